"""torchtitan_ext: four training methods on torchtitan.

Importing the package installs the CPU as a torchtitan device where the machine
has no accelerator, so it must be imported before torchtitan's own modules.
"""

from torchtitan_ext import device as _device
from torchtitan_ext._version import __version__

__all__ = ["__version__"]

_device.install()
