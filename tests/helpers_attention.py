"""Attention over static caches as the trace writes it, in ONNX text, with RoPE of every kind."""

from __future__ import annotations

import onnx_ir as ir
from helpers_lowering import graph_of

CONTEXT = 32


def attention_graph(
    size: int, rotary: int, interleaved: bool, window: int, softcap: float
) -> ir.Model:
    """Two heads on one KV head over static caches, as the trace writes them."""
    turned = {name: _rotary_text(name, size, rotary, interleaved) for name in ("q", "k")}
    text = f"""g (int64[1,n] input_ids, int32[1] past_lengths, float[1,n,{2 * size}] qf,
      float[1,n,{size}] kf, float[1,n,{size}] vf, float[1,1,{CONTEXT},{size}] pk,
      float[1,1,{CONTEXT},{size}] pv)
    => (float[1,n,{2 * size}] y, float[1,1,{CONTEXT},{size}] rk, float[1,1,{CONTEXT},{size}] rv)
    {{ lens = Cast<to=7>(past_lengths)  zero = Constant<value_int=0>()
      one = Constant<value_int=1>()  ax0 = Constant<value_ints=[0]>()
      ax1 = Constant<value_ints=[1]>()  ax2 = Constant<value_ints=[2]>()
      nn = Shape<start=1, end=2>(input_ids)  count = Squeeze(nn, ax0)
      steps = Range(zero, count, one)  base = Unsqueeze(lens, ax1)
      pos = Add(base, steps)  posf = Cast<to=1>(pos)  pos3 = Unsqueeze(posf, ax2)
      freq = Constant<value_floats=[{", ".join(str(0.7**i) for i in range(max(rotary // 2, 1)))}]>()
      angle = Mul(pos3, freq)  c1 = Cos(angle)  s1 = Sin(angle)
      {_both("c", interleaved, rotary)} {_both("s", interleaved, rotary)}
      q4s = Constant<value_ints=[0,0,2,{size}]>()  k4s = Constant<value_ints=[0,0,1,{size}]>()
      q4 = Reshape(qf, q4s)  q0 = Transpose<perm=[0,2,1,3]>(q4)
      k4 = Reshape(kf, k4s)  k0 = Transpose<perm=[0,2,1,3]>(k4)
      v4 = Reshape(vf, k4s)  v = Transpose<perm=[0,2,1,3]>(v4)
      {turned["q"]} {turned["k"]}
      rk = TensorScatter<axis=2, mode="linear">(pk, k, lens)
      rv = TensorScatter<axis=2, mode="linear">(pv, v, lens)
      top = Constant<value_int={CONTEXT}>()  columns = Range(zero, top, one)
      row = Unsqueeze(pos, ax2)  seen0 = LessOrEqual(columns, row)
      width = Constant<value_int={window or CONTEXT}>()  low = Sub(row, width)
      near = Greater(columns, low)  seen1 = And(seen0, near)  seen = Unsqueeze(seen1, ax1)
      o = Attention<scale=0.25, softcap={softcap}>(q, rk, rv, seen)
      back = Transpose<perm=[0,2,1,3]>(o)  flat = Constant<value_ints=[0,0,{2 * size}]>()
      y = Reshape(back, flat) }}"""
    model = graph_of(text, {})
    node = next(n for n in model.graph if n.op_type == "Attention")
    node.metadata_props["outrider.window"] = str(window)
    return model


def _both(name: str, interleaved: bool, rotary: int) -> str:
    """One angle a pair → one a feature, with a head axis."""
    if not interleaved:
        return f"{name}2 = Concat<axis=-1>({name}1, {name}1)  {name}os = Unsqueeze({name}2, ax1)"
    return f"""ax3{name} = Constant<value_ints=[3]>()  {name}4 = Unsqueeze({name}1, ax3{name})
      {name}5 = Concat<axis=-1>({name}4, {name}4)  {name}6 = Constant<value_ints=[0,0,{rotary}]>()
      {name}2 = Reshape({name}5, {name}6)  {name}os = Unsqueeze({name}2, ax1)"""


def _rotary_text(name: str, size: int, rotary: int, interleaved: bool) -> str:
    """`x * cos + rotate(x) * sin` on the first `rotary` features; none for 0."""
    if not rotary:
        return f"{name} = Identity({name}0)"
    x, out = (f"{name}0", name) if rotary == size else (f"{name}p", f"{name}t")
    slices = {"a": (0, rotary // 2, 1), "b": (rotary // 2, rotary, 1)}
    if interleaved:
        slices = {"a": (0, rotary, 2), "b": (1, rotary, 2)}
    lines = [] if rotary == size else [slice_text(f"{name}p", f"{name}0", 0, rotary, 1)]
    lines += [slice_text(f"{name}{part}", x, *bounds) for part, bounds in slices.items()]
    lines.append(f"{name}n = Neg({name}b)")
    if interleaved:
        lines += [
            f"{name}last = Constant<value_ints=[4]>()",
            f"{name}n5 = Unsqueeze({name}n, {name}last)  {name}a5 = Unsqueeze({name}a, {name}last)",
            f"{name}j = Concat<axis=-1>({name}n5, {name}a5)",
            f"{name}js = Constant<value_ints=[0,0,0,{rotary}]>()",
            f"{name}r = Reshape({name}j, {name}js)",
        ]
    else:
        lines.append(f"{name}r = Concat<axis=-1>({name}n, {name}a)")
    lines.append(
        f"{name}c = Mul({x}, cos)  {name}s = Mul({name}r, sos)  {out} = Add({name}c, {name}s)"
    )
    if rotary != size:
        lines.append(slice_text(f"{name}u", f"{name}0", rotary, size, 1))
        lines.append(f"{name} = Concat<axis=-1>({name}t, {name}u)")
    return "\n".join(lines)


def slice_text(out: str, x: str, start: int, end: int, step: int) -> str:
    names = {"b": start, "e": end, "x": 3, "s": step}
    constants = "  ".join(f"{out}{k} = Constant<value_ints=[{v}]>()" for k, v in names.items())
    return f"{constants}  {out} = Slice({x}, {out}b, {out}e, {out}x, {out}s)"
