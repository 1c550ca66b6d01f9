"""Which layers POP prunes: the paper's last ones, the first ones, or some all over the model."""

from pop_engine.configs.prune_plan import PrunePlan


def last_layers(plan: PrunePlan) -> tuple[int, ...]:
    """The paper's."""
    return tuple(plan.tail)


def first_layers(plan: PrunePlan) -> tuple[int, ...]:
    """As many, counted from the embeddings."""
    return tuple(range(plan.num_tail_layers))


def interleaved_layers(plan: PrunePlan) -> tuple[int, ...]:
    """As many, evenly spread and ending with the last: of every three layers the third, where a third is pruned."""
    count = plan.num_tail_layers
    return tuple((index + 1) * plan.num_hidden_layers // count - 1 for index in range(count))
