"""torchrun, without its own traceback when a run ended on an error in the input.

Takes torchrun's arguments: ``python -m torchtitan_ext.launch --nproc-per-node 2 -m MODULE ...``.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

USER_ERROR = 2
"""Exit code with which ``torchtitan_ext.train`` reports an error in the input."""


def main(argv: list[str] | None = None) -> None:
    """Start the processes; exit with the code of the first that failed."""
    # The failing rank has printed why; the launcher's own report comes with the exception.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run(parse_args(argv if argv is not None else sys.argv[1:]))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode != USER_ERROR:
            raise
        if first.local_rank != 0:  # its line may be filtered out of the log
            print(
                f"error: rank {rank} refused its input; LOG_RANK={first.local_rank} shows why",
                file=sys.stderr,
            )
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
