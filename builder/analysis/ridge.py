"""Ridge regression of many outputs on one set of inputs, in one pass over the data."""

from collections.abc import Sequence

import torch

# Penalty of an input's weight as a share of the input's own sum of squares. Anything from 1e-5 to 1e-2 does the same
# on tens of thousands of tokens; it is for inputs that hardly vary or depend on each other.
DEFAULT_RIDGE = 1e-4
# An input that does not vary has no sum of squares; its penalty is then a share of the largest.
_FLOOR = 1e-12


class RidgeFit:
    """Sums for y ≈ A x + b, in fp64: one Gram matrix of x for all outputs, and no sample is kept.

    The penalty is ridge · Σ_j S_jj · |A_j|², with S the centred Gram matrix: ridge regression on standardised
    inputs (Hoerl and Kennard, 1970), so neither the scale of an input nor that of an output matters. The bias is not
    penalised.
    """

    def __init__(self, num_inputs: int, num_outputs: Sequence[int]) -> None:
        self.num_samples = 0
        # The last input is the intercept.
        self._gram = torch.zeros(num_inputs + 1, num_inputs + 1, dtype=torch.float64)
        self._products = [torch.zeros(num_inputs + 1, size, dtype=torch.float64) for size in num_outputs]

    def add(
        self, inputs: torch.Tensor, outputs: Sequence[torch.Tensor], intercepts: torch.Tensor | None = None
    ) -> None:
        """Count samples in: inputs [n, num_inputs], and one [n, size] for each output.

        A sample that is a sum of others, or weighted, has an intercept [n] of its own: y ≈ A x + b · intercept.
        """
        if intercepts is None:
            intercepts = torch.ones_like(inputs[:, 0])
        self.num_samples += len(inputs)
        rows = torch.cat([inputs, intercepts[:, None]], dim=1).double()
        self._gram.addmm_(rows.T, rows)
        for products, output in zip(self._products, outputs, strict=True):
            products.addmm_(rows.T, output.double())

    def solve(self, ridge: float = DEFAULT_RIDGE) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weight A [size, num_inputs] and bias b [size] of each output, in fp64."""
        mass = self._gram[-1, -1]
        mean = self._gram[-1, :-1] / mass
        gram = self._gram[:-1, :-1] - mass * torch.outer(mean, mean)
        own = gram.diagonal().clone()
        gram.diagonal().add_(ridge * own.clamp_min(_FLOOR * float(own.max())))
        factor = torch.linalg.cholesky(gram)
        solutions = []
        for products in self._products:
            output_mean = products[-1] / mass
            centred = products[:-1] - mass * torch.outer(mean, output_mean)
            weight = torch.cholesky_solve(centred, factor).T
            solutions.append((weight, output_mean - weight @ mean))
        return solutions
