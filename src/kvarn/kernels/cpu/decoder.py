"""All layers of a model in one native call a step (csrc/decoder_module.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvarn.kernels.api import CodeMatrix, LayerProgram, PlainStep, Rope
from kvarn.kernels.cpu import _native
from kvarn.kernels.cpu.codes import ACTIVATIONS, DTYPES
from kvarn.kernels.cpu.matrix import Matrix
from kvarn.kernels.cpu.step import CpuStep


class CpuDecoder:
    """See `kvarn.kernels.api.Decoder`."""

    __slots__ = ("_keep", "_laid", "_native")

    def __init__(self, isa: str, layers: Sequence[LayerProgram], norm: Tensor, eps: float) -> None:
        """Raises TypeError for a matrix that is not held in the native layout."""
        self._native = _native.Decoder(isa, norm.data_ptr(), DTYPES[norm.dtype], eps)
        self._keep = (tuple(layers), norm)
        self._laid: tuple[object, object] = (None, None)  # the places and rotations that the native side knows
        for layer in layers:
            params = layer.params
            norms = (
                layer.before_attention,
                layer.after_attention,
                layer.before_mlp,
                layer.after_mlp,
                layer.q_norm,
                layer.k_norm,
            )
            self._native.add(
                _native_matrix(layer.qkv),
                _native_matrix(layer.out),
                _native_matrix(layer.gate_up),
                _native_matrix(layer.down),
                [_address(norm) for norm in norms],
                layer.eps,
                layer.head_eps,
                layer.query_heads,
                layer.kv_heads,
                ACTIVATIONS[layer.activation],
                params.scale,
                params.window_tokens or 0,
                params.chunk_tokens or 0,
                params.soft_cap or 0.0,
                _address(params.sinks),
            )

    def run(
        self,
        x: Tensor,
        step: PlainStep,
        ropes: Sequence[Rope],
        rope_of: tuple[int, ...],
        read_rows: Tensor | None = None,
    ) -> Tensor:
        if self._laid[0] is not step.places or self._laid[1] is not rope_of:
            self._native.lay([(group, index, rope) for (group, index), rope in zip(step.places, rope_of, strict=True)])
            self._laid = (step.places, rope_of)
        x = x.contiguous()
        n_read = x.shape[0] if read_rows is None else read_rows.shape[0]
        out = x.new_empty((n_read, x.shape[1]))
        steps = []
        for kernel in step.kernels:
            assert isinstance(kernel, CpuStep)
            steps.append(kernel.address)
        self._native.run(
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            DTYPES[x.dtype],
            steps,
            [(r.cos.data_ptr(), r.sin.data_ptr(), r.cos.shape[1]) for r in ropes],
            _address(read_rows),
            -1 if read_rows is None else n_read,
            torch.get_num_threads(),
        )
        return out


def runs_whole(layers: Sequence[LayerProgram]) -> bool:
    """Are all matrices held in the native layout?"""
    return all(isinstance(m, Matrix) for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down))


def _native_matrix(matrix: CodeMatrix) -> _native.Matrix:
    if not isinstance(matrix, Matrix):
        raise TypeError(f"{type(matrix).__name__} is not held in the native layout")
    return matrix.native


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
