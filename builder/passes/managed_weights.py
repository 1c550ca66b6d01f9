"""Managed weights: parameters under the checkpoint's names, outside the graph's files, one copy for both graphs."""

from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout


class DetachWeights(ir.passes.InPlacePass):
    """Turn parameters into graph inputs, so that no later pass can fold, rename or transpose one.

    `names` maps initializer names to the checkpoint's. Buffers, which it does not name, stay constants.
    """

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self._names = names
        self.detached: dict[str, ir.Value] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Move the parameters of this graph to its inputs."""
        graph = model.graph
        for value in [value for name, value in graph.initializers.items() if name in self._names]:
            assert value.name is not None
            canonical = self._names[value.name]
            del graph.initializers[value.name]
            value.const_value = None
            first = self.detached.setdefault(canonical, value)
            if first is value:
                value.name = canonical
                graph.inputs.append(value)
            else:
                ir.convenience.replace_all_uses_with(value, first)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """What is left are constants that the graph may hold."""
        left = [name for name in model.graph.initializers if name in self._names]
        if left:
            raise ir.passes.PostconditionError(f"parameters left in the graph: {left[:3]}")


class AttachWeights(ir.passes.InPlacePass):
    """Turn the parameters back into initializers, as external data at their place in the weight files."""

    def __init__(self, detached: Mapping[str, ir.Value], layout: WeightLayout) -> None:
        super().__init__()
        self._detached = detached
        self._layout = layout

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Attach what the graph still uses; a pruned layer's other parameters leave it."""
        graph = model.graph
        for name, value in self._detached.items():
            graph.inputs.remove(value)
            if value.uses():
                value.const_value = self._external(name, value)
                graph.initializers[name] = value
        return ir.passes.PassResult(model, modified=True)

    def _external(self, name: str, value: ir.Value) -> ir.ExternalTensor:
        entry = self._layout.entries[name]
        assert value.dtype is not None
        return ir.ExternalTensor(
            entry.file, entry.offset, entry.num_bytes, value.dtype, shape=ir.Shape(entry.shape), name=name, base_dir=""
        )


class KeepWeightInputs(ir.passes.InPlacePass):
    """Leave the parameters as graph inputs, behind the contract's own; those that nothing reads go."""

    def __init__(self, detached: Mapping[str, ir.Value]) -> None:
        super().__init__()
        self._detached = detached

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove what a pruned layer does not need."""
        unused = [value for value in self._detached.values() if not value.uses()]
        for value in unused:
            model.graph.inputs.remove(value)
        return ir.passes.PassResult(model, modified=bool(unused))
