"""Third parties kept from talking over a command."""

import logging
import os
import warnings


def quiet() -> None:
    """Silence what third parties say about themselves; errors and our own warnings stay."""
    from transformers.utils import logging as transformers_logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(format="atlas: %(message)s", level=logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers|accelerate)\.")
