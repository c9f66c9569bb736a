"""A small process beside rank 0 that sees when a rank fails, dies or is stopped, and tells it.

Launchers kill all ranks as soon as one has died, so none of them could say which one it was. Each
rank holds a connection to the witness and says its updates there. The first connection that ends
without a word, or is silent for too long, names the rank; the others are then told to end.

``watchdog`` starts it, as a script: it imports nothing but the standard library.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

SILENCE = 5.0  # seconds without a sign of life from a rank that trains
CONNECT = 30.0  # seconds that the first rank may take to connect
TURN = 0.25  # seconds between looks at the clock
START = 6  # times the timeout before the first update
END = 5.0  # seconds that the ranks have to end
RESUME = "What was saved is intact, and the same command goes on from there"


class Peer:
    """A connection. ``rank``: None until it has given the key. ``update``: its last one, or None
    before training; ``notes``: how often it has noted that it got on; ``heard``: when it last said
    something; ``left``: whether it said goodbye."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.rank, self.update = line, None, None
        self.heard, self.left, self._rest = time.monotonic(), False, b""
        self.notes = 0

    def read(self) -> list[dict[str, Any]] | None:
        """Return what was said since the last call; None at the end of the connection."""
        try:
            data = self.line.recv(1 << 16)
        except OSError:
            data = b""
        self.heard = time.monotonic()
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(text) for text in whole] if data else None


class Witness:
    """Listens at ``server`` to ranks that know ``key``. ``names``: of the ranks, for messages.

    ``timeout``: seconds in which one of the ranks must note something.
    """

    def __init__(
        self, server: socket.socket, key: str, names: list[str], timeout: float = float("inf")
    ) -> None:
        self._key, self._names = key, names
        self._first: int | None = None  # update that a rank has named
        self._update: int | None = None
        self._timeout, self._noted = timeout, time.monotonic()
        self._peers: dict[socket.socket, Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._server, self._deadline = server, time.monotonic() + CONNECT
        self._told = self._met = False

    def run(self) -> None:
        """Serve until no rank is left."""
        looked = time.monotonic()
        while self._peers or not self._met:
            for event, _ in self._selector.select(TURN):
                if event.data is None:
                    self._accept()
                else:
                    self._hear(event.data)
            now = time.monotonic()
            if now - looked > 8 * TURN:  # the witness itself was stopped, perhaps with the ranks
                for peer in self._peers.values():
                    peer.heard = now
                self._noted = now
            looked = now
            begun = self._update != self._first
            allowed = self._timeout * (1 if begun else START)
            if self._peers and now - self._noted > allowed:
                what = "got on" if begun else "finished its first update"
                self._tell(f"no rank has {what} for {allowed:g} s", 1, where=True)
            if now > self._deadline and (self._told or not self._met):
                return
            for peer in self._peers.values():
                if peer.update is not None and not peer.left and now - peer.heard > SILENCE:
                    self._lost(peer, f"has given no sign of life for {SILENCE:g} s: it is stopped")

    def _accept(self):
        line, _ = self._server.accept()
        line.settimeout(1)
        peer = self._peers[line] = Peer(line)
        self._selector.register(line, selectors.EVENT_READ, peer)

    def _hear(self, peer):
        try:
            said = peer.read()
        except ValueError:
            said = None
        for words in said or ():
            if peer.rank is None:
                if words.get("key") != self._key:
                    said = None
                    break
                peer.rank, self._met = words["rank"], True
            if "update" in words:
                peer.update = words["update"]
                if peer.update is not None:
                    self._update = max(peer.update, self._update or 0)
                    self._first = self._update if self._first is None else self._first
            if words.get("notes", peer.notes) != peer.notes:
                peer.notes, self._noted = words["notes"], time.monotonic()
            peer.left = peer.left or "bye" in words
            if "failed" in words:
                self._tell(f"{self._name(peer)}: {words['failed']}", words["code"])
        if said is None:
            self._selector.unregister(peer.line)
            del self._peers[peer.line]
            peer.line.close()
            if peer.rank is not None and not peer.left:
                self._lost(peer, "has ended without a word: it was killed, or it crashed")

    def _name(self, peer):
        return self._names[peer.rank] + (f", after update {self._update:,}" if self._update else "")

    def _lost(self, peer, how):
        self._tell(f"{self._name(peer)}, {how}", 1)

    def _tell(self, text, code, where=False):
        """Print the first thing that goes wrong, and let all ranks end; ``where``: and tell where
        they are."""
        if self._told:
            return
        self._told, self._deadline = True, time.monotonic() + END
        resume = f". {RESUME}" if self._update is not None else ""
        os.write(2, f"gpuattn: error: {text.rstrip('.')}{resume}\n".encode())
        words = {"end": code} | ({"where": True} if where else {})
        for peer in self._peers.values():
            try:
                peer.line.sendall(json.dumps(words).encode() + b"\n")
            except OSError:
                continue


def main() -> None:
    """Read the host to listen at, the key and the names from standard input; print the port."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    with socket.create_server((given["host"], 0)) as server:
        print(server.getsockname()[1], flush=True)
        sys.stdout.close()
        Witness(server, given["key"], given["names"], given["timeout"]).run()


if __name__ == "__main__":
    main()
