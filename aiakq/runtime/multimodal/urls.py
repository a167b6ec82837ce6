"""URLs of media: data, file and http(s), with limits on size and time and on what they may reach."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.images import refused
from aiakq.runtime.multimodal.videos import check_frames
from aiakq.system.daemon_thread import in_daemon_thread

#: Largest file, and seconds to fetch one.
MAX_FILE_BYTES, MAX_SECONDS = 32 << 20, 10.0
_MAX_REDIRECTS = 3
#: Largest number of characters of a file in base64.
_MAX_TEXT = MAX_FILE_BYTES // 3 * 4 + 8
#: Addresses of IPv6 that end with one of IPv4, to which a gateway may pass packets: IPv4-compatible ones, and NAT64's.
_IPV4_AT_THE_END = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b::/96"))
#: The prefix of NAT64 for use within a site (RFC 8215), which older Pythons take for a global one.
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")


class MediaUrls:
    """Reads media by their URLs.

    media_path  folder of files that file:// URLs may name; None for none.
    domains     hosts from which media are fetched; empty for every host with a public address.
    """

    def __init__(self, media_path: str | None = None, domains: Sequence[str] = ()) -> None:
        self._folder = None if media_path is None else os.path.realpath(media_path)
        self._domains = frozenset(domain.lower() for domain in domains)

    def read(self, url: str, param: str) -> bytes:
        """Return the bytes of a file. It blocks: a server calls it in a thread, or ``fetch``.

        Raises ``media_refused``, with ``param`` as the name of the URL.
        """
        scheme = _scheme(url)
        if scheme == "data":
            return data_of(url, param)
        if scheme == "file":
            return self._file(url, param)
        if is_fetched(url):
            # In a thread of its own: the caller's may have an event loop, as those of notebooks do.
            with ThreadPoolExecutor(1) as executor:
                return executor.submit(asyncio.run, self.fetch(url, param)).result()
        raise refused(param, "a URL that begins with data:, https: or http: is expected")

    def read_video(self, url: str, param: str) -> list[bytes]:
        """Return the files of a video: one of an animation, or one for each frame. Blocks and raises as ``read``."""
        return frames_of(url, param) if _scheme(url) == "data" else [self.read(url, param)]

    def _file(self, url: str, param: str) -> bytes:
        if self._folder is None:
            raise refused(param, "file URLs need --allowed-local-media-path")
        try:
            parts = urllib.parse.urlsplit(url)
            path = os.path.realpath(urllib.parse.unquote(parts.path))
            if parts.netloc not in ("", "localhost") or os.path.commonpath([self._folder, path]) != self._folder:
                raise refused(param, "the file is not in the folder of --allowed-local-media-path")
            if not os.path.isfile(path):
                raise refused(param, "there is no such file")
            if os.path.getsize(path) > MAX_FILE_BYTES:
                raise _too_large(param)
            with open(path, "rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except AiakqError:
            raise
        except (OSError, ValueError):
            raise refused(param, "the file cannot be read") from None

    async def fetch(self, url: str, param: str) -> bytes:
        """Return the bytes behind an http or https URL. Raises ``media_refused``."""
        import httpx

        try:
            return await self._fetched(url, param)
        except AiakqError:
            raise
        except TimeoutError:
            raise refused(param, f"it takes longer than {MAX_SECONDS:g} s") from None
        except socket.gaierror:
            raise refused(param, "its host is not found") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as failure:
            raise refused(param, f"it cannot be fetched ({type(failure).__name__})") from None

    async def _fetched(self, url: str, param: str) -> bytes:
        """Return the body behind ``url``. The time limit is for everything together: a host may answer byte by byte."""
        import httpx

        async with asyncio.timeout(MAX_SECONDS):
            # Without proxies of the environment, which would resolve the name anew.
            async with httpx.AsyncClient(trust_env=False, timeout=MAX_SECONDS, follow_redirects=False) as client:
                for _ in range(1 + _MAX_REDIRECTS):
                    found = await self._get(client, url, param)
                    if isinstance(found, bytes):
                        return found
                    url = found
        raise refused(param, "it is redirected too often")

    async def _get(self, client: Any, url: str, param: str) -> bytes | str:
        """Return the body of ``url``, or the URL to which it is redirected."""
        parsed = client.build_request("GET", url)
        host = parsed.url.host
        address = await self._address(host, parsed.url.port or (443 if parsed.url.scheme == "https" else 80), param)
        # The address that was checked is the one that is used: a name may resolve to another one a moment later.
        parsed = client.build_request(
            "GET",
            parsed.url.copy_with(host=address),
            headers={
                "Host": parsed.headers["Host"],
                "Accept": "image/*, video/*, audio/*",
                "Accept-Encoding": "identity",
            },
            extensions={"sni_hostname": host},
        )
        answer = await client.send(parsed, stream=True)
        try:
            if answer.is_redirect:
                target = urllib.parse.urljoin(url, answer.headers.get("location", ""))
                if urllib.parse.urlsplit(target).scheme not in ("http", "https"):
                    raise refused(param, "it is redirected to another kind of URL")
                return str(target)
            if answer.status_code != 200:
                raise refused(param, f"its host answers with status {answer.status_code}")
            body = bytearray()
            async for piece in answer.aiter_raw():  # compressed, it could become much larger
                body += piece
                if len(body) > MAX_FILE_BYTES:
                    raise _too_large(param)
            return bytes(body)
        finally:
            await answer.aclose()

    async def _address(self, host: str, port: int, param: str) -> str:
        """Return an address of ``host`` from which media may be fetched."""
        if self._domains and host.lower().rstrip(".") not in self._domains:
            raise refused(param, "its host is not one of --allowed-media-domains")
        # Name servers that do not answer hold a thread for longer than the time limit.
        entries = await in_daemon_thread(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        found = {str(entry[4][0]) for entry in entries}
        if not self._domains and not all(is_public(address) for address in found):
            raise refused(param, "its host has an address that is not public")
        return sorted(found, key=lambda address: (":" in address, address))[0]


def is_fetched(url: str) -> bool:
    """Whether a URL is one of http or https."""
    return _scheme(url) in ("http", "https")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in _LOCAL_NAT64:
            return False
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if inner is None and any(parsed in network for network in _IPV4_AT_THE_END):
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            parsed = inner
    return parsed.is_global and not parsed.is_multicast


def data_of(url: str, param: str) -> bytes:
    """Return the bytes of a data URL. Raises ``media_refused``."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise refused(param, "data:...;base64, and the file in base64 are expected")
    return _decoded(data, param)


def frames_of(url: str, param: str) -> list[bytes]:
    """Return the files of a video in a data URL, separated by commas. Raises ``media_refused``."""
    head, _, data = url.partition(",")
    if not data or not head.endswith(";base64"):
        expected = "data:video/jpeg;base64,FRAME,FRAME,... with files in base64"
        raise refused(param, f"{expected}, or data:video/gif;base64, and an animated file are expected")
    check_frames(data.count(",") + 1, param)
    if len(data) > _MAX_TEXT:
        raise _too_large(param)
    return [_decoded(frame, param) for frame in data.split(",")]


def _decoded(data: str, param: str) -> bytes:
    if len(data) > _MAX_TEXT:
        raise _too_large(param)
    try:
        return base64.b64decode(urllib.parse.unquote(data) if "%" in data else data, validate=True)
    except (binascii.Error, ValueError):
        raise refused(param, "it is not valid base64") from None


def _scheme(url: str) -> str:
    return url[:16].partition(":")[0].lower()


def _too_large(param: str) -> Exception:
    return refused(param, f"the file is larger than {MAX_FILE_BYTES >> 20} MiB")
