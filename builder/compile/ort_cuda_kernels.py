"""Which operators ONNX Runtime has CUDA kernels for, and in which floating-point dtypes."""

# As registered by onnxruntime-gpu 1.31.1 (its get_all_opkernel_def), for the version that each operator has in this
# opset of the standard. docs/OperatorKernels.md of the same release says the same.
KERNELS_OF = "1.31.1"
OPSET = 24

_ONE_OF_THREE = ("bf16", "fp16", "fp32")
_MIXED = ("bf16 fp16 fp32",)
_FP32_OR_FP16 = ("fp16", "fp32")

# Each group of dtypes is one kernel's: all floating-point tensors of a node must be in one group.
_BY_GROUPS: dict[tuple[str, ...], str] = {
    _ONE_OF_THREE: (
        "Abs Add Attention Conv Cos Div Erf Exp Gelu Gemm HardSigmoid MatMul Mul Neg ReduceMean ReduceSum Relu "
        "RotaryEmbedding Sigmoid Sin Softmax Softplus Sqrt Sub Tanh Where "
        "com.microsoft.Attention com.microsoft.FusedMatMul com.microsoft.Gelu com.microsoft.MoE "
        "com.microsoft.QuickGelu com.microsoft.RotaryEmbedding com.microsoft.SkipSimplifiedLayerNormalization"
    ),
    _MIXED: (
        "Cast Concat ConstantOfShape Expand Flatten Gather GatherElements Identity Max Min Pow Reshape "
        "ScatterElements ScatterND Shape Slice Split Squeeze TensorScatter Tile TopK Transpose Unsqueeze "
        "com.microsoft.BiasGelu"
    ),
    ("fp16 fp32",): "Clip CumSum Einsum",
    _FP32_OR_FP16: "Equal Floor Greater GreaterOrEqual Less LessOrEqual Log Pad Reciprocal ReduceMax",
    ("bf16", "fp16"): "com.microsoft.GroupQueryAttention",
    ("bf16 fp32", "fp16 fp32"): "LayerNormalization",
    ("bf16", "fp16 fp32"): "RMSNormalization",
}

KERNELS: dict[str, tuple[frozenset[str], ...]] = {
    name: tuple(frozenset(group.split()) for group in groups)
    for groups, names in _BY_GROUPS.items()
    for name in names.split()
}
