"""The parts of a script whose rows lie on table servers that are killed."""

from __future__ import annotations

from typing import Any

# Two tables, whose ids follow from the samples; rows are used often, seldom and never.
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        given = dict(servers=2, replicas={replicas}, dtype=torch.float64)
        self.many, self.few = pl.SparseEmbedding(5000, 4, "sum", seed=1, **given), pl.SparseEmbedding(40, 3, seed=2, **given)
        self.top = nn.Linear(7, 1).double()
    def forward(self, x):
        ids = (x * 1000).long()
        return self.top(torch.cat([self.many(ids % 5000), self.few(ids % 37)], dim=1).tanh())
model = Net()
def slay(now, which, where):  # one of the servers that this worker has started
    if now and run._prepared.tables.lasting and not (out / where).exists():
        (out / where).touch()
        run._context.table_servers.__self__._processes[which].kill()
"""  # noqa: E501


SAVED = (
    "[*model.parameters(), model.many.lookup(torch.arange(5000)), "
    "model.few.lookup(torch.arange(40))]"
)


def parts(
    replicas: int = 1, optimizer: str = "torch.optim.Adagrad(model.parameters(), 0.1)", **more: Any
) -> dict[str, Any]:
    return {"model": NET.format(replicas=replicas), "optimizer": optimizer, "saved": SAVED, **more}
