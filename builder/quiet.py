"""Keep the libraries' own chatter off the terminal: what matters to a user, this package says itself."""

import logging
import warnings


def quiet_libraries(*, verbose: bool) -> None:
    """Silence warnings and info logs of torch and transformers, unless asked for."""
    if verbose:
        return
    warnings.filterwarnings("ignore")
    for name in ("torch", "transformers", "huggingface_hub", "onnxscript", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
