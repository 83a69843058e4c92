"""The code interpreter of a sandbox: Jupyter kernels behind a small HTTP server.

It runs inside, as the image's user, on port 49999, and speaks what E2B's code
interpreter SDKs speak: POST /execute answers with one JSON object a line. It
guards nothing: who may ask was decided outside, and code in a kernel can do to
this process what it can do to any other of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import signal
import sys

import tornado.iostream
import tornado.web
from contexts import Busy, Context, Contexts, Died, Unknown, normal

PORT = 49999
MAX_BODY = 64 << 20
# A line when nothing came for so long: what is in between sees that the connection lives.
KEEPALIVE = 20.0
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Refused(tornado.web.HTTPError):
    """An answer that is not 200, as plain text: the SDKs show it as it is."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status)
        self.message = message


class Handler(tornado.web.RequestHandler):
    @property
    def contexts(self) -> Contexts:
        return self.settings["contexts"]

    def write_error(self, status_code: int, **kwargs: object) -> None:
        error = kwargs.get("exc_info", (None, None))[1]
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(error.message if isinstance(error, Refused) else f"{status_code} {self._reason}")

    def body(self) -> dict:
        try:
            body = json.loads(self.request.body or b"{}")
        except ValueError:
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body is no JSON object")
        return body

    def text_of(self, body: dict, name: str, default: str | None = None) -> str | None:
        value = body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise Refused(400, f"{name} is not a string")
        return value

    def variables(self, body: dict, name: str) -> dict[str, str]:
        value = body.get(name) or {}
        if not isinstance(value, dict) or not all(isinstance(v, str) and "\0" not in v for v in value.values()):
            raise Refused(400, f"{name} is no object of strings")
        return value

    def language(self, body: dict) -> str | None:
        said = self.text_of(body, "language")
        try:
            return normal(said) if said else None
        except KeyError:
            raise Refused(400, f"no language {said[:40]!r}; there are {', '.join(self.contexts.languages)}") from None

    def found(self, context_id: str) -> Context:
        try:
            return self.contexts.get(context_id)
        except Unknown:
            raise Refused(404, f"Context {context_id[:80]} not found") from None

    def reply(self, value: object) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


class Health(Handler):
    def get(self) -> None:
        self.reply("OK")


class Execute(Handler):
    """One execution. Who leaves takes it along: the kernel is interrupted."""

    running: asyncio.Task | None = None

    async def post(self) -> None:
        body = self.body()
        code, context_id, language = self.text_of(body, "code"), self.text_of(body, "context_id"), self.language(body)
        if code is None:
            raise Refused(400, "code is missing")
        if context_id and language:
            raise Refused(400, "Only one of context_id or language can be provided")
        context = self.found(context_id) if context_id else self.contexts.default(language or "python")
        asked = self.variables(body, "env_vars")
        for key in asked:
            if not NAME.match(key):
                raise Refused(400, f"{key[:80]!r} is no name of a variable")
        # What a shell has no name for, the sandbox may still have.
        given = {**{k: v for k, v in self.variables(body, "sandbox_env").items() if NAME.match(k)}, **asked}
        self.set_header("Content-Type", "application/x-ndjson")
        await self.flush()
        lines: asyncio.Queue[dict | None] = asyncio.Queue()
        self.running = asyncio.ensure_future(context.execute(code, given, Outlet(lines)))
        self.running.add_done_callback(lambda _: lines.put_nowait(None))
        try:
            await self.copy(lines)
            await self.running
        except (tornado.iostream.StreamClosedError, asyncio.CancelledError):
            self.running.cancel()

    async def copy(self, lines: asyncio.Queue[dict | None]) -> None:
        while True:
            try:
                line = await asyncio.wait_for(lines.get(), KEEPALIVE)
            except asyncio.TimeoutError:
                line = {"type": "keepalive"}
            if line is None:
                return
            text = json.dumps(line)
            self.write(text + "\n")
            await self.flush()
            if isinstance(line, Sized):
                line.sent()

    def on_connection_close(self) -> None:
        if self.running is not None:
            self.running.cancel()


class Sized(dict):
    """A line that counts against what may wait to be sent."""

    outlet: Outlet
    size: int

    def sent(self) -> None:
        self.outlet.waiting -= self.size


class Outlet:
    """Where an execution's lines go. A kernel is never slowed down, its messages would be
    lost and the end with them; so what waits is bounded here, and what is over is dropped."""

    MOST = 32 << 20

    def __init__(self, lines: asyncio.Queue[dict | None]) -> None:
        self.lines, self.waiting, self.dropped = lines, 0, 0

    def put(self, line: dict, size: int = 0) -> None:
        if size and self.waiting + size > self.MOST and self.waiting:
            self.dropped += size
            return
        if self.dropped:
            self.lines.put_nowait({"type": "stderr", "text": f"[{self.dropped} bytes of output were dropped: nobody read them in time]\n"})
            self.dropped = 0
        sized = Sized(line)
        sized.outlet, sized.size = self, size
        self.waiting += size
        self.lines.put_nowait(sized)


class ContextList(Handler):
    def get(self) -> None:
        self.reply([c.told() for c in self.contexts.all()])

    async def post(self) -> None:
        body = self.body()
        cwd = self.text_of(body, "cwd") or home()
        if not os.path.isdir(cwd):
            raise Refused(400, f"cwd {cwd[:200]!r} is no directory")
        try:
            context = await self.contexts.create(self.language(body) or "python", cwd)
        except Busy as err:
            raise Refused(429, str(err)) from None
        except Died as err:
            raise Refused(500, str(err)) from None
        self.reply(context.told())


class OneContext(Handler):
    async def delete(self, context_id: str) -> None:
        await self.contexts.remove(self.found(context_id))
        self.reply(None)


class Restart(Handler):
    async def post(self, context_id: str) -> None:
        try:
            await self.found(context_id).restart()
        except Died as err:
            raise Refused(500, str(err)) from None
        self.reply(None)


def home() -> str:
    return pwd.getpwuid(os.getuid()).pw_dir


async def main() -> None:
    contexts = Contexts(home())
    app = tornado.web.Application(
        [
            (r"/health", Health),
            (r"/execute", Execute),
            (r"/contexts", ContextList),
            (r"/contexts/([^/]+)", OneContext),
            (r"/contexts/([^/]+)/restart", Restart),
        ],
        contexts=contexts,
        log_function=lambda handler: None,
    )
    await contexts.warm(sys.argv[1:])
    app.listen(PORT, address="127.0.0.1", max_body_size=MAX_BODY, max_buffer_size=MAX_BODY)
    stop = asyncio.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(s, stop.set)
    await stop.wait()
    await contexts.close()


if __name__ == "__main__":
    asyncio.run(main())
