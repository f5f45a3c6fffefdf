"""Where binaries and verdicts are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``PAGEDATTN_CACHE_DIR``, else the user's cache folder for pagedattn.

    Raises
    ------
    OSError
        If there is neither that variable nor a home folder.
    """
    import platformdirs  # only needed once something is kept

    chosen = os.environ.get("PAGEDATTN_CACHE_DIR")
    try:
        folder = chosen or platformdirs.user_cache_dir("pagedattn", appauthor=False)
    except RuntimeError as error:  # what pathlib says of a missing home
        raise OSError(f"no home folder is known; set PAGEDATTN_CACHE_DIR ({error})") from error
    path = Path(os.path.expanduser(folder))
    if str(path).startswith("~") or not (chosen or path.is_absolute()):
        raise OSError(f"no home folder is known for {folder}; set PAGEDATTN_CACHE_DIR")
    return path
