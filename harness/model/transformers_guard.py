"""Keeps transformers from taking our package `kernels` for the hub's package of the same name.

It imports no model and no torch.
"""

from __future__ import annotations


def protect_kernels_name() -> None:
    """Keep transformers from taking our package `kernels` for the hub's. Call before anything imports a transformers model.

    transformers asks for a package of that name when its first model module is imported, and imports names from it if the
    version suits. Answering "not available" is right: no hub kernel may replace what is measured here.
    """
    from transformers import utils
    from transformers.utils import import_utils

    def unavailable(*_args: object, **_options: object) -> bool:
        return False

    utils.is_kernels_available = unavailable
    import_utils.is_kernels_available = unavailable
