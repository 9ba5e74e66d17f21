"""What records and replays: a CUDA device, or a simulation of one."""

from .cuda_driver import CudaDriver
from .driver import DeviceDriver
from .reasons import CaptureError
from .simulated_driver import SimulatedDriver

__all__ = ["CaptureError", "CudaDriver", "DeviceDriver", "SimulatedDriver"]
