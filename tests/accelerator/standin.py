"""The stand-in accelerator as a PyTorch device: `register()`, then `torch.device("standin")`.

Registering changes `torch.accelerator` for the whole process, so that only processes of their own do it. The tests of
this folder start them; importing this module does nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerator.build import built


def register() -> types.ModuleType:
    """Loads the device into this process under the name `standin`; returns `torch.standin`.

    The backend `standin_nccl` of `torch.distributed` plays NCCL: `init_process_group("cpu:gloo,standin:standin_nccl")`.
    """
    if "standin_device" not in sys.modules:
        spec = importlib.util.spec_from_file_location("standin_device", built())
        assert spec is not None
        assert spec.loader is not None
        device = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(device)
        sys.modules["standin_device"] = device
        torch.utils.rename_privateuse1_backend("standin")
        torch._register_device_module("standin", _module(device))
        torch.utils.generate_methods_for_privateuse1_backend()
        dist.Backend.register_backend("standin_nccl", lambda *of: _group(device, *of), devices=["standin"])
    return sys.modules["torch.standin"]


def _group(device: Any, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    return device.group(dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout))


def _module(device: Any) -> types.ModuleType:
    """What PyTorch asks of a device's module, and the counters of ours."""
    module = types.ModuleType("torch.standin")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "synchronize": lambda index=None: torch.accelerator.synchronize(),
        "current_stream": lambda index=None: torch.accelerator.current_stream(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": device.in_bad_fork,
        "_lazy_init": lambda: None,
        "manual_seed": device.seed,
        "manual_seed_all": device.seed,
        "get_rng_state": lambda index=0: device.default_generator().get_state(),
        "set_rng_state": lambda state, index=0: device.default_generator().set_state(state),
        "synchronizations": device.synchronizations,
        "pinned_bytes": device.pinned_bytes,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
