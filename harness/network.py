"""Whether a server answers, found out in a second instead of after a client library's minutes of retries.

It does not know what is wanted from the server: weights, a data set and run tracking ask alike.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request

PROBE_S = 1.5


def hub_or_cache() -> bool:
    """True if the Hugging Face hub answers. Otherwise its libraries are switched to their caches, which fail at once when empty.

    Call it before anything is loaded by a hub id. A user's own HF_HUB_OFFLINE=1 is honoured without a probe.
    """
    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE:
        return False
    if answers(hub.ENDPOINT):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import, by the libraries that are not imported yet
    hub.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def answers(url: str, wait_s: float = PROBE_S) -> bool:
    """Whether the server at `url` answers within `wait_s`, through the environment's proxies. A 5xx is no answer."""
    answered: list[bool] = []

    def ask() -> None:
        answered.append(_asked(url, wait_s))

    # In a thread of its own, because looking a name up obeys no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(wait_s)
    return answered == [True]


def _asked(url: str, wait_s: float) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=wait_s).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # somebody answered; the real client may hold the right certificates
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
