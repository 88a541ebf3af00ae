"""Which backend serves a model on a device."""

from __future__ import annotations

from cupyflash.backend import AttentionBackend, AttentionSelectorConfig

from .flash_attn import FlashAttentionBackend
from .mla import MLABackend
from .reference import ReferenceBackend

__all__ = ["backend_priority", "get_attn_backend", "unsupported_reasons"]

Capability = tuple[int, int]

_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.get_name(): backend for backend in (FlashAttentionBackend, ReferenceBackend, MLABackend)
}


def backend_priority(
    device_capability: Capability | None, use_mla: bool = False
) -> tuple[str, ...]:
    """Names of the backends to try on a device, best first; None = NumPy arrays."""
    if use_mla:
        return ("FLASH_ATTN_MLA",)
    return ("REFERENCE", "FLASH_ATTN") if device_capability is None else ("FLASH_ATTN",)


def unsupported_reasons(
    config: AttentionSelectorConfig, device_capability: Capability | None
) -> dict[str, list[str]]:
    """Why each backend cannot serve a configuration; an empty list where it can.

    Parameters
    ----------
    config : AttentionSelectorConfig
    device_capability : (int, int) or None
        None = NumPy arrays.
    """
    return {
        name: backend.validate_configuration(config, device_capability)
        for name, backend in _BACKENDS.items()
    }


def get_attn_backend(
    config: AttentionSelectorConfig,
    device_capability: Capability | None,
    backend: str | None = None,
) -> type[AttentionBackend]:
    """The best backend for a model on a device.

    Parameters
    ----------
    config : AttentionSelectorConfig
    device_capability : (int, int) or None
        Of the GPU, such as ``(9, 0)``; None = NumPy arrays.
    backend : str, optional
        Take this one, or say why it cannot.

    Returns
    -------
    type

    Raises
    ------
    ValueError
        There is no such backend, or none can serve the configuration; gives every reason.

    Examples
    --------
    >>> config = AttentionSelectorConfig(head_size=64, dtype="float32")
    >>> get_attn_backend(config, None).get_name()
    'REFERENCE'
    """
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}; use one of {', '.join(_BACKENDS)}")
    names = backend_priority(device_capability, config.use_mla)
    if backend is not None:
        names = (backend,)
    reasons = unsupported_reasons(config, device_capability)
    for name in names:
        if not reasons[name]:
            return _BACKENDS[name]
    listed = " ".join(f"{name}: {'; '.join(reasons[name])}." for name in names)
    where = "NumPy arrays" if device_capability is None else f"a GPU of {device_capability}"
    raise ValueError(f"no backend for {config} on {where}. {listed}")
