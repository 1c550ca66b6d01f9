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
        self._sum_inputs = torch.zeros(num_inputs, dtype=torch.float64)
        self._gram = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
        self._sum_outputs = [torch.zeros(size, dtype=torch.float64) for size in num_outputs]
        self._products = [torch.zeros(num_inputs, size, dtype=torch.float64) for size in num_outputs]

    def add(self, inputs: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Count samples in: inputs [n, num_inputs], and one [n, size] for each output."""
        inputs = inputs.double()
        self.num_samples += len(inputs)
        self._sum_inputs += inputs.sum(0)
        self._gram.addmm_(inputs.T, inputs)
        for index, output in enumerate(outputs):
            self._sum_outputs[index] += output.double().sum(0)
            self._products[index].addmm_(inputs.T, output.double())

    def solve(self, ridge: float = DEFAULT_RIDGE) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weight A [size, num_inputs] and bias b [size] of each output, in fp64."""
        mean = self._sum_inputs / self.num_samples
        gram = self._gram - self.num_samples * torch.outer(mean, mean)
        own = gram.diagonal().clone()
        gram.diagonal().add_(ridge * own.clamp_min(_FLOOR * float(own.max())))
        factor = torch.linalg.cholesky(gram)
        solutions = []
        for total, products in zip(self._sum_outputs, self._products, strict=True):
            output_mean = total / self.num_samples
            centred = products - self.num_samples * torch.outer(mean, output_mean)
            weight = torch.cholesky_solve(centred, factor).T
            solutions.append((weight, output_mean - weight @ mean))
        return solutions
