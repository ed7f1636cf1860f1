"""The decoder with everything between its attentions made by torch.compile: `compile: true`.

It does not know how attention runs: that stays with the strategy and its kernels, which the compiler cannot see through.
"""

from __future__ import annotations

import torch

from harness.errors import UserError
from harness.model.architecture import Architecture
from harness.model.decoder import Decoder
from harness.model.weights import Weights
from kernels import reference
from kernels.api import Ops


class TracedOps:
    """The ops between attentions in plain torch, which a compiler can fuse; it sees no counters and no checks."""

    rms_norm = staticmethod(reference.rms_norm)
    rope = staticmethod(reference.rope)
    gated = staticmethod(reference.gated)
    linear = staticmethod(torch.nn.functional.linear)


class CompiledDecoder(Decoder):
    """A `Decoder` whose two halves of a layer, before and after attention, are one compiled graph each, for any number of tokens.

    UserError where torch.compile cannot make code.
    """

    compiled = True

    def __init__(self, architecture: Architecture, weights: Weights, ops: Ops) -> None:
        super().__init__(architecture, weights, ops)
        require_compiler(str(self.device))
        traced = Decoder(architecture, weights, ops)
        traced.ops = TracedOps()
        self._project = torch.compile(traced._project, fullgraph=True, dynamic=True)
        self._mlp = torch.compile(traced._mlp, fullgraph=True, dynamic=True)

    def _chain(self, tokens: int) -> None:
        """What lies between attentions is the compiler's here, also where the backend would run it as one call."""


def require_compiler(device: str) -> None:
    """UserError unless torch.compile makes code for `device` here: on a CPU that takes a C++ compiler."""
    try:
        made = torch.compile(lambda x: torch.relu(x) + 1, fullgraph=True)(torch.zeros(8, device=device))
        torch.testing.assert_close(made, torch.ones(8, device=device))
    except Exception as error:  # the compiler's own exceptions derive from no common class
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"compile=true needs a compiler that torch.compile can use on {device}, and it failed here ({reason}): "
            "install a C++ compiler, or set compile=false"
        ) from error
