"""torchrun that stops, restarts and fails in an orderly way.

Takes torchrun's arguments: ``python -m torchtitan_ext.launch --nproc-per-node 2 -m MODULE ...``.

- SIGTERM or SIGUSR1 is passed on to the processes, which finish their step and
  save; a second one, at least a second later, ends them at once.
- A process that dies is restarted with the others (``--max-restarts``); one
  that refused its input or stopped on request is not.
- Every failure is a few lines without a traceback of the launcher's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args, parse_min_max_nnodes

from torchtitan_ext import endpoint
from torchtitan_ext.errors import UserError
from torchtitan_ext.faults.errors import LostContact, NonFinite
from torchtitan_ext.startup import ATTEMPT
from torchtitan_ext.stopping import DELIBERATE, SIGNALS, STOPPED, STOPPED_UNSAVED, USER_ERROR

FINAL = (USER_ERROR, NonFinite.exit_code)
"""Exit codes of errors that come again in the same place: nothing is restarted."""

GRACE = "STOP_GRACE"
"""Environment variable: seconds that the processes have to stop in."""

GRACE_S = 240.0
"""Its default, below the 300 seconds of warning that launch/train.slurm asks for."""

SAME_REQUEST_S = 1.0
"""Signals this close together are one request: schedulers signal a job step and its processes."""

LAST_WORDS_S = 20.0
"""Seconds for this node's processes to end by themselves when the first node is gone."""

BEYOND_S = 5.0
"""Seconds beyond its own limit that the rendezvous has: where it can, it says itself what is wrong."""


def say(text: str) -> None:
    """A line of the launcher's own, beside those of the processes."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


class StoppedEarly(Exception):
    """A stop signal while no process runs; there is nothing to wait for."""


class Signals:
    """What this launcher was asked to do."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        """The first stop signal."""
        self.at_once: signal.Signals | None = None
        """A signal that ends everything now."""
        self.waiting = False
        """Whether no process runs, so that a signal may interrupt whatever the launcher does."""
        self._first = 0.0

    def install(self) -> None:
        for number in (*SIGNALS, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        got = signal.Signals(number)
        if got in (signal.SIGINT, signal.SIGHUP):
            self.at_once = got
        elif self.stop is None:
            self.stop, self._first = got, time.monotonic()
        elif time.monotonic() - self._first > SAME_REQUEST_S:
            self.at_once = got
        if self.waiting:
            self.waiting = False
            raise StoppedEarly


class Agent(LocalElasticAgent):
    """torchelastic's agent, which knows a stop and a refusal from a failure."""

    def __init__(
        self, spec: WorkerSpec, *, signals: Signals, nodes: int, grace_s: float, **kwargs: Any
    ) -> None:
        super().__init__(spec, **kwargs)
        self._signals, self._nodes, self._grace_s = signals, nodes, grace_s
        self._deadline: float | None = None
        self.code = 0
        """The exit code, where it is not that of a success or a failure."""
        self.died: set[int] = set()
        """Processes of the last failed group that ended by themselves; this launcher ended the others."""
        self.joined = 0
        """Nodes seen in the rendezvous, this one included."""

    # --- before the processes run --------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = worker_group.spec.rdzv_handler
        # torchelastic keeps its store from one round to the next, and the restarted processes would
        # find the addresses of dead ones in it ("connectFullMesh failed"). Without one it makes another.
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        done = threading.Event()
        watcher = threading.Thread(target=self._watch_joining, args=(done,), daemon=True)
        watcher.start()
        try:
            self._signals.waiting = True
            if self._signals.stop or self._signals.at_once:
                raise StoppedEarly
            super()._rendezvous(worker_group)
        finally:
            self._signals.waiting = False
            done.set()
            watcher.join()
        os.environ[ATTEMPT] = str(getattr(_state(handler), "round", 0))

    def _watch_joining(self, done: threading.Event) -> None:
        """Say now and then how many nodes are there; the rendezvous itself only times out."""
        begin = time.monotonic()
        pause = 15.0
        shown = begin + pause
        while not done.wait(0.2):
            members = getattr(_state(self._rdzv_handler), "participants", ())
            # On its timeout a node takes itself out before it gives up.
            self.joined = max(self.joined, len(members))
            if self._nodes > 1 and time.monotonic() > shown:
                say(f"{self.joined} of {self._nodes} nodes after {time.monotonic() - begin:.0f} s; waiting")
                pause *= 2
                shown += pause

    # --- while they run ------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except RendezvousConnectionError:
            # The node that served the rendezvous has ended. Its reason is mostly one that the
            # processes here know too, such as a refused config: let them end by themselves.
            self._remaining_restarts = 0
            deadline = time.monotonic() + LAST_WORDS_S
            while time.monotonic() < deadline and self._pcontext is not None:
                result = self._monitor_workers(self._worker_group)
                if result.state != WorkerState.HEALTHY:
                    return result
                time.sleep(0.1)
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_on()
        self._end_survivors()
        result = super()._monitor_workers(worker_group)
        return self._judged(result) if result.state == WorkerState.FAILED else result

    def _running(self) -> dict[int, int | None]:
        """Exit code by process id, None while it runs."""
        context: Any = self._pcontext
        return {handler.proc.pid: handler.proc.poll() for handler in context.subprocess_handlers.values()}

    def _kill(self) -> None:
        for pid, code in self._running().items():
            if code is None:
                os.killpg(pid, signal.SIGKILL)  # torchelastic gives each a session of its own

    def _pass_on(self) -> None:
        signals = self._signals
        if signals.at_once is not None:
            say(f"{signals.at_once.name}: ending all processes at once; they resume from the last checkpoint")
            self._remaining_restarts, self.code = 0, 128 + signals.at_once
            self._kill()
        elif signals.stop is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            self._remaining_restarts = 0
            running = [pid for pid, code in self._running().items() if code is None]
            say(
                f"{signals.stop.name}: {len(running)} processes finish their step and save "
                f"(at most {self._grace_s:g} s, {GRACE}); a second signal ends them at once"
            )
            for pid in running:
                # SIGUSR1 whatever came in: a process that the scheduler has signalled too must not
                # take it for a second SIGTERM.
                os.kill(pid, signal.SIGUSR1)
        elif self._deadline is not None and time.monotonic() > self._deadline and not self.code:
            say(f"not stopped within {self._grace_s:g} s ({GRACE}): killed; the last checkpoint holds")
            self.code = STOPPED
            self._kill()

    def _end_survivors(self) -> None:
        """End the peers of a process that died: they wait in a collective, where SIGTERM is only noted."""
        failed = {pid for pid, code in self._running().items() if code not in (None, 0, *FINAL, *DELIBERATE)}
        if failed:
            self.died = failed
            self._kill()

    def _judged(self, result: RunResult) -> RunResult:
        """What a failed group means: a refusal, a stop, or a failure that may be restarted."""
        codes = [failure.exitcode for failure in result.failures.values()]
        if self.code:  # ended by this launcher
            return result
        final = next((code for code in FINAL if code in codes), 0)
        if final:
            self._remaining_restarts, self.code = 0, final
        elif STOPPED in codes or STOPPED_UNSAVED in codes:
            self._remaining_restarts = 0
            self.code = STOPPED if STOPPED in codes else STOPPED_UNSAVED
            # The ranks of all nodes stopped together: end as a success does, when all nodes are done.
            ranks = {worker.global_rank: None for worker in self.get_worker_group().workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=ranks)
        elif self._signals.stop is not None and all(-code in (*SIGNALS, signal.SIGKILL) for code in codes):
            # They had not come as far as handling it.
            say("stopped before the first step")
            self.code = STOPPED
        elif self._remaining_restarts > 0:
            used = self.get_worker_group().spec.max_restarts - self._remaining_restarts + 1
            say(
                f"{self.describe(result)}; restart {used} of {self.get_worker_group().spec.max_restarts}, "
                "from the newest whole checkpoint"
            )
        return result

    def describe(self, result: RunResult) -> str:
        """The process that failed first, by itself."""
        own = {rank: f for rank, f in result.failures.items() if f.pid in self.died} or result.failures
        rank, failure = min(own.items(), key=lambda item: (item[1].timestamp, item[0]))
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        return f"rank {rank} (process {failure.pid} on {socket.gethostname()}) {how}"

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End what still runs; whoever was to stop in peace has done so by now."""
        super()._shutdown(signal.SIGKILL, timeout)


def _state(handler: Any) -> Any:
    """The rendezvous state as this node saw it last; None for other kinds of rendezvous."""
    return getattr(getattr(handler, "_state_holder", None), "state", None)


# --- the command ---------------------------------------------------------------------------


def launch(argv: list[str]) -> int:
    """Start the processes and see them to their end; the exit code."""
    grace_s = _seconds(GRACE, GRACE_S)
    signals = Signals()
    signals.install()
    with _refused():
        config, entrypoint, arguments = config_from_args(_arguments(argv))
    if config.nproc_per_node < 1:
        raise UserError(f"--nproc-per-node is {config.nproc_per_node}, expected 1 or more processes")
    # The others are handled here; the agent would raise in the midst of starting processes.
    config.signals_to_handle = "SIGQUIT"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    handler: Any = None
    try:
        signals.waiting = True
        with _refused():
            endpoint.prepare(config)
            handler = _handler(config)
        signals.waiting = False
        return _run(config, entrypoint, arguments, handler=handler, signals=signals, grace_s=grace_s)
    except StoppedEarly:
        if signals.at_once is not None:
            say(f"{signals.at_once.name}: ended before any process ran")
            return 128 + signals.at_once
        assert signals.stop is not None
        say(f"{signals.stop.name}: stopped before any process ran (exit code {STOPPED})")
        return STOPPED
    finally:
        if handler is not None:
            handler.shutdown()


def _arguments(argv: list[str]) -> Any:
    """The options, with torchrun's defaults: it fills them in between its parser and its config."""
    args = parse_args(argv)
    unsaid = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.master_port is None:
        args.master_port = 29500
    if args.standalone or (unsaid and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", f"alone-{os.getpid()}"
    return args


@contextlib.contextmanager
def _refused() -> Generator[None]:
    """torchrun's refusals of an option, and of the system's for its log folder, are lines of our own.

    Raises:
        UserError: what was refused.
    """
    try:
        yield
    except (ValueError, AssertionError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(str(error)) from error


def _handler(config: LaunchConfig) -> Any:
    def build() -> Any:
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        return rendezvous.get_rendezvous_handler(parameters)

    try:
        return _built(build, config)
    except RendezvousConnectionError as error:
        if config.rdzv_configs.get("is_host") == "true":
            # Another launcher on this machine was faster.
            config.rdzv_configs["is_host"] = "false"
            with contextlib.suppress(RendezvousConnectionError):
                return _built(build, config)
        why = str(error.__cause__ or error).splitlines()[0]
        raise UserError(
            f"no rendezvous at {config.rdzv_endpoint}: {why}: is the port another program's, or not allowed? "
            "Take a free one of the first node (MASTER_PORT)"
        ) from error


def _built(build: Callable[[], Any], config: LaunchConfig) -> Any:
    """The rendezvous handler, built in a thread: its store is waited for in C++, where no signal arrives.

    Raises:
        UserError: the port is not that of a rendezvous; what else listens there may never answer.
    """
    limit_s = float(config.rdzv_configs.get("join_timeout", 600))
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(build())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(timeout=limit_s + BEYOND_S)
    except TimeoutError:
        if future.done():
            raise
        raise UserError(
            f"what answers at {config.rdzv_endpoint} did not do so as a rendezvous does within {limit_s:g} "
            "s: is the port another program's? Take a free one of the first node (MASTER_PORT)"
        ) from None


def _run(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: list[str],
    *,
    handler: Any,
    signals: Signals,
    grace_s: float,
) -> int:
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
    )
    agent = Agent(
        spec,
        signals=signals,
        nodes=config.min_nodes,
        grace_s=grace_s,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
    )
    try:
        result = agent.run()
    except RendezvousTimeoutError:
        raise UserError(_too_few(config, joined=agent.joined)) from None
    except RendezvousClosedError:
        say("another node ended the run; its log says why")
        return 1
    except RendezvousConnectionError:
        if agent.code:
            return agent.code
        say(f"the rendezvous at {config.rdzv_endpoint} is gone: the node that served it ended or is cut off")
        return 1
    if agent.code in FINAL:
        _say_refusal(result, code=agent.code, first_node=agent.get_worker_group().group_rank == 0)
    elif agent.code in (STOPPED, STOPPED_UNSAVED):
        say(f"stopped (exit code {agent.code})")
    elif not agent.code and result.is_failed():
        # A rank that lost contact has said so in a line; otherwise the table may hold a traceback.
        lost = any(f.exitcode == LostContact.exit_code for f in result.failures.values())
        if not lost:
            print(ChildFailedError(spec.get_entrypoint_name(), result.failures), file=sys.stderr)
        say(f"{agent.describe(result)}; no restarts left of {config.max_restarts} (--max-restarts)")
        return LostContact.exit_code if lost else 1
    return agent.code


def _too_few(config: LaunchConfig, *, joined: int) -> str:
    limit = config.rdzv_configs.get("join_timeout", 600)
    return (
        f"rendezvous at {config.rdzv_endpoint}: {max(joined, 1)} of {config.min_nodes} nodes joined within "
        f"{limit} s (RDZV_TIMEOUT): start the others with the same RDZV_ENDPOINT and RDZV_ID, "
        f"{config.run_id!r} here"
    )


def _say_refusal(result: RunResult, *, code: int, first_node: bool) -> None:
    """The rank has printed why; where its line may not be in this log, say where it is."""
    ranks = {rank: f.local_rank for rank, f in result.failures.items() if f.exitcode == code}
    what = "refused its input" if code == USER_ERROR else f"ended the run (exit code {code})"
    if not first_node:
        print(f"error: a rank {what}; a line above or rank 0's log says why", file=sys.stderr)
    elif 0 not in ranks.values():
        rank, local_rank = min(ranks.items())
        print(f"error: rank {rank} {what}; LOG_RANK={local_rank} shows why", file=sys.stderr)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise UserError(f"{name} = {text!r} (environment): must be a positive number of seconds")
    return value


def main(argv: list[str] | None = None) -> None:
    """Start the processes; exit with 0, 1, a deliberate exit code, or 128 + the signal that ended them."""
    # What they report as errors is said here in a line, or by the processes themselves.
    for name in ("multiprocessing.api", "agent.server.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        code = launch(argv if argv is not None else sys.argv[1:])
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        code = USER_ERROR
    except SignalException as error:
        say(f"{error.sigval.name}: ended all processes at once")
        code = 128 + error.sigval
    sys.exit(code)


if __name__ == "__main__":
    main()
