#!/usr/bin/env python3
"""nvidia-imex and nvidia-imex-ctl as far as their users see them, by the name that it is started with.

    nvidia-imex -c FILE        connects to the nodes of its file, by addresses of /etc/hosts ($IMEX_HOSTS instead)
    nvidia-imex-ctl -c FILE -q READY, or what the daemon is
    nvidia-imex-ctl -c FILE -N the names of the nodes that the daemon is connected to

The daemon finds itself among the nodes by its address, keeps a connection to each other one, and looks addresses up
again at SIGUSR1 alone.  $IMEX_SLOW: a file that it waits for before it is ready.  Source: "IMEX Service for NVLink
Networks" of NVIDIA.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def read_config(path: str) -> dict[str, str]:
    lines = Path(path).read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines if "=" in line)


class Daemon:
    def __init__(self, config: dict[str, str]) -> None:
        self.config = config
        self.address = config["IMEX_CMD_BIND_INTERFACE_IP"]
        self.port = int(config["SERVER_PORT"])
        self.names = Path(config["IMEX_NODE_CONFIG_FILE"]).read_text().split()
        self.known: dict[str, str] = {}
        self.links: dict[str, socket.socket] = {}

    def look_up(self) -> None:
        text = Path(os.environ.get("IMEX_HOSTS", "/etc/hosts")).read_text()
        pairs = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        found = {name: address for address, *names in pairs for name in names if name in self.names}
        if self.address not in found.values():
            sys.exit(f"own address {self.address} is not of a node in {found}")
        for name, link in list(self.links.items()):
            if found.get(name) != self.known.get(name):
                link.close()
                del self.links[name]
        self.known = found

    def run(self) -> None:
        news = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR1, lambda *_: news.set())
        self.look_up()
        peers = socket.create_server((self.address, self.port))
        threading.Thread(target=self.accept, args=(peers,), daemon=True).start()
        slow = os.environ.get("IMEX_SLOW")
        while slow and not os.path.exists(slow):
            time.sleep(0.05)
        commands = socket.create_server((self.address, int(self.config["IMEX_CMD_PORT"])))
        threading.Thread(target=self.answer, args=(commands,), daemon=True).start()
        while True:
            if news.wait(0.05):
                news.clear()
                self.look_up()
            for name, address in self.known.items():
                if address != self.address and not self.is_linked(name):
                    self.connect(name, address)

    def is_linked(self, name: str) -> bool:
        link = self.links.get(name)
        if link is None:
            return False
        try:
            link.setblocking(False)
            gone = link.recv(1) == b""
        except BlockingIOError:
            return True
        except OSError:
            gone = True
        if gone:
            self.links.pop(name).close()
        return not gone

    def connect(self, name: str, address: str) -> None:
        try:
            self.links[name] = socket.create_connection((address, self.port), timeout=1)
        except OSError:
            self.links.pop(name, None)

    def accept(self, server: socket.socket) -> None:
        held = []
        while True:
            held.append(server.accept()[0])

    def answer(self, server: socket.socket) -> None:
        while True:
            client, _ = server.accept()
            with client:
                client.sendall(json.dumps({"nodes": sorted(self.links)}).encode())


def ask(config: dict[str, str], what: str) -> None:
    place = (config["IMEX_CMD_BIND_INTERFACE_IP"], int(config["IMEX_CMD_PORT"]))
    try:
        with socket.create_connection(place, timeout=5) as link:
            answer = json.loads(link.makefile().read())
    except OSError:
        sys.exit("DAEMON NOT RUNNING")
    print("READY" if what == "-q" else "\n".join(answer["nodes"]))


if __name__ == "__main__":
    settings = read_config(sys.argv[2])
    if sys.argv[0].endswith("ctl"):
        ask(settings, sys.argv[3])
    else:
        Daemon(settings).run()
