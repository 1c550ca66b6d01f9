"""`python -m pop_engine.runtime.partition`: which provider of ONNX Runtime each node of a graph is given to.

This is how a builder looks at the partition without importing the runtime: as a process, on the graph's file.
"""

import argparse
import json
import sys
from pathlib import Path

import onnxruntime as ort

from pop_engine.configs.errors import EngineError, exit_with_message


def main() -> int:
    """Print one JSON line: for every node [provider, name, operator]."""
    parser = argparse.ArgumentParser(prog="pop_engine.runtime.partition", description=main.__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--provider", default="CUDAExecutionProvider", help="what nodes are offered to first")
    arguments = parser.parse_args()
    return exit_with_message("partition", lambda: _print(arguments.graph, arguments.provider))


def partition(graph: Path, provider: str) -> list[tuple[str, str, str]]:
    """(provider, name, operator) of every node, fused ones included. Raises EngineError where the graph cannot load."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = ort.InferenceSession(graph, options, providers=[provider, "CPUExecutionProvider"])
        parts = session.get_provider_graph_assignment_info()
    except Exception as error:
        raise EngineError(f"{graph}: ONNX Runtime {ort.__version__} cannot load it ({error})") from error
    if provider not in session.get_providers():
        raise EngineError(f"{graph}: ONNX Runtime {ort.__version__} has no working {provider} here")
    return [(part.ep_name, node.name, node.op_type) for part in parts for node in part.get_nodes()]


def _print(graph: Path, provider: str) -> int:
    print(json.dumps(partition(graph, provider)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
