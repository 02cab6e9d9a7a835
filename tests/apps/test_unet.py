"""The U-Net: its shapes, its skips, and what others rely on: names in order, a forward that can
be traced, edges that aren't there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from paceline.apps.unet import UNet, UNetShape
from paceline.parallel.pipelining.layer_graph import trace_layers
from tests.harness.layered_models import backward_parts, run_parts
from tests.harness.models import fill

SMALL = UNetShape(inward=3, outward=2, width=4, levels=2)
LAYERS = ["enter", "down.0", "down.1", "middle", "up.0", "up.1", "leave"]


def fields(count: int = 2, side: int = 8) -> Tensor:
    return torch.randn(
        count, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def net(shape: UNetShape = SMALL) -> nn.Module:
    return fill(UNet(shape).double())


@pytest.mark.parametrize(
    "shape", [SMALL, UNetShape(3, 1, 5, 1), UNetShape(3, 2, 3, 3, "batch")], ids=repr
)
def test_shapes(shape: UNetShape) -> None:
    model = net(shape)
    found = model(fields())
    assert found.shape == (2, shape.outward, 8, 8) and torch.equal(
        fx.symbolic_trace(model)(fields()), model(fields())
    )
    found.square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


def test_the_norm_is_what_the_shape_says() -> None:
    kinds = {
        norm: {type(m) for m in UNet(UNetShape(norm=norm)).modules()} for norm in ("group", "batch")
    }
    assert (
        nn.GroupNorm in kinds["group"] - kinds["batch"]
        and nn.BatchNorm2d in kinds["batch"] - kinds["group"]
    )


def test_layers_are_called_in_the_order_of_their_names() -> None:
    """Stages with consecutive layers are the model, to the bit; what skips carry goes through
    the stages between.
    """
    model, whole = net(), net()
    result = whole(fields())
    result.square().sum().backward()
    for names in ("enter, down.*, middle, up.*, leave", "auto"):
        graph = trace_layers(model, names)
        assert list(graph.layers) == LAYERS or names == "auto"
        for starts in ([0], [0, 2, 4], list(range(len(graph.layers)))):
            model.zero_grad()
            found, records = run_parts(graph, starts, (fields(),))
            assert torch.equal(found, result)
            backward_parts(records, found.square().sum())
            assert all(
                torch.equal(p.grad, q.grad)
                for p, q in zip(model.parameters(), whole.parameters(), strict=True)
            )  # type: ignore[arg-type]
    assert {"enter", "down_0"} < set(trace_layers(model, ", ".join(LAYERS)).make_part(3, 4).takes)


def test_nothing_is_special_about_the_edges() -> None:
    """A field that is moved by whole cells of the lowest level gives what is moved as far."""
    model, moved = net(), fields().roll((4, -8), (2, 3))
    assert torch.allclose(model(moved), model(fields()).roll((4, -8), (2, 3)))


def test_skips_go_past_the_levels_below() -> None:
    """With nothing from below, each point is seen from a few points around it; with nothing but
    that, from half of the square.
    """

    def seen(*cut: str) -> Tensor:
        """From where the point (16, 16) is seen, in a channel that isn't added to what comes
        out.
        """
        # GroupNorm sees all points
        model, x = net(replace(SMALL, norm="batch")).eval(), fields(1, 32).requires_grad_()
        for name in cut:
            model.get_submodule(name).register_forward_hook(
                lambda module, args, out: torch.zeros_like(out)
            )
        (grad,) = torch.autograd.grad(model(x)[0, 0, 16, 16], x)
        return (grad[0, 2] != 0).nonzero() - 16

    whole, fine, middle = seen(), seen("down.0"), seen("middle")
    # four convolutions: two of enter, two of up.1
    assert int(fine.abs().max()) == 4 and len(fine) == 81
    assert 4 < int(middle.abs().max()) < int(whole.abs().max())
    assert len(seen("enter")) == 0


def test_what_is_learned_is_the_change() -> None:
    model, x = UNet(SMALL).double(), fields()
    with torch.no_grad():
        for p in model.leave.parameters():
            p.zero_()
    assert torch.equal(model(x), x[:, :2])
