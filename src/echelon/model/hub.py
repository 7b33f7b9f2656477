"""Whether the Hugging Face hub can be asked, found out in seconds: its own client retries for half a minute."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_SECONDS = 5.0


def is_hub_reachable() -> bool:
    """Whether the hub, or the proxy before it, takes a connection, and the user has not asked to stay offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(endpoint.scheme)
    if proxy and not proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
