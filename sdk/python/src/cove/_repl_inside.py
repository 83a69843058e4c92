"""What runs inside for Sandbox.repl(): sent as text, so it stands alone and asks for Python 3.7 only.

The host writes requests to stdin and reads frames from stdout; both are moved
out of the way first, so that what code prints, and what its children print,
goes through pipes and comes as frames. Code in here may forge frames: it then
lies about itself only, and the host believes nothing but lengths within bounds.
"""

import ast
import json
import os
import signal
import sys
import threading
import traceback

requests = os.fdopen(os.dup(0), "rb")
frames = os.dup(1)
lock = threading.Lock()


def send(kind, data=b"", **more):
    more["kind"], more["size"] = kind, len(data)
    rest = memoryview(json.dumps(more).encode() + b"\n" + data)
    with lock:
        while rest:
            rest = rest[os.write(frames, rest) :]


class Drain(threading.Thread):
    """Turns what is written to a descriptor into frames. settle() returns when all of it has been."""

    def __init__(self, fd, kind):
        super().__init__(daemon=True)
        self.source, into = os.pipe()
        os.dup2(into, fd)
        os.close(into)
        self.fd, self.kind, self.mark, self.settled = fd, kind, b"", threading.Event()
        self.start()

    def run(self):
        held = b""
        while True:
            held += os.read(self.source, 1 << 16)
            mark = self.mark
            if mark and mark in held:
                before, _, held = held.partition(mark)
                if before:
                    send(self.kind, before)
                self.settled.set()
            # A mark may have come in part.
            keep = len(mark) - 1 if mark and not self.settled.is_set() else 0
            if len(held) > keep:
                cut = len(held) - keep
                send(self.kind, held[:cut])
                held = held[cut:]

    def settle(self):
        self.settled.clear()
        self.mark = os.urandom(16).hex().encode()
        os.write(self.fd, self.mark)
        self.settled.wait()
        self.mark = b""


os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
drains = Drain(1, "stdout"), Drain(2, "stderr")
sys.stdin = open(0)
sys.stdout = open(1, "w", buffering=1, closefd=False)
sys.stderr = open(2, "w", buffering=1, closefd=False)


class BudgetExceeded(RuntimeError):
    """The host allows no more of these calls."""


def ask(what, body):
    import urllib.error
    import urllib.request

    asked = urllib.request.Request(CALLBACK + "/" + what, data=json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked) as answer:
            return json.loads(answer.read())["results"]
    except urllib.error.HTTPError as e:
        error = json.loads(e.read() or b"{}").get("error", "the host did not answer")
        raise (BudgetExceeded if e.code == 429 else RuntimeError)(error) from None


def llm(prompt, **options):
    """Ask the model the host has."""
    return ask("llm", {"prompts": [prompt], "options": options})[0]


def llm_batch(prompts, **options):
    """Ask it all of these at once; the answers in order."""
    return ask("llm", {"prompts": list(prompts), "options": options})


def rlm(prompt, context=None):
    """Have a session like this one, one level below, work on a prompt."""
    return ask("rlm", {"prompt": prompt, "context": context})


def answer(value):
    """Give the final answer."""
    state["answer"] = value


state = {"running": False}


def interrupt(*_):
    # Only code is interrupted, never the reading of a request or the writing of a frame.
    if state["running"]:
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, interrupt)
names = {"__name__": "__main__", "answer": answer}
for function in (llm, llm_batch) if "llm" in OFFERS else ():
    names[function.__name__] = function
if "rlm" in OFFERS:
    names["rlm"] = rlm
names["BudgetExceeded"] = BudgetExceeded
given = set(names) | {"__builtins__"}


def evaluate(code):
    """Run code; the value of an expression at its end."""
    tree = ast.parse(code, "<repl>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<repl>", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "<repl>", "eval"), names)


def told(error):
    """The traceback, from code of the session on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != "<repl>":
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def jsonable(value):
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def respond(head, body):
    done = {"id": head["id"]}
    data = b""
    try:
        if head["op"] == "run":
            import linecache

            code = body.decode()
            linecache.cache["<repl>"] = len(code), None, code.splitlines(True), "<repl>"
            state.pop("answer", None)
            state["running"] = True
            value = evaluate(code)
            if value is not None:
                data = repr(value)[: head["limit"]].encode("utf-8", "replace")
            state["running"] = False
            if "answer" in state:
                text = jsonable(state["answer"])
                done["answer"] = json.dumps(str(state["answer"])) if text is None else text
        elif head["op"] == "load":
            with open(head["path"], "rb") as f:
                raw = f.read()
            os.remove(head["path"])
            as_what = {"bytes": bytes, "text": lambda b: b.decode(), "json": json.loads}
            names[head["name"]] = as_what[head["as"]](raw)
        elif head["op"] == "get":
            text = jsonable(names[head["name"]])
            if text is None:
                kind = type(names[head["name"]]).__name__
                raise TypeError("%s is a %s, which has no form in JSON" % (head["name"], kind))
            data = text.encode()
        elif head["op"] == "names":
            seen = {k: type(v).__name__ for k, v in names.items() if k not in given and not k.startswith("__")}
            data = json.dumps(seen).encode()
    except KeyboardInterrupt as e:
        done["interrupted"], done["error"], data = True, "KeyboardInterrupt", told(e).encode("utf-8", "replace")
    except BaseException as e:  # SystemExit too: it ends the code, not the session
        done["error"], data = type(e).__name__, told(e).encode("utf-8", "replace")
    finally:
        state["running"] = False
    return done, data


send("ready")
while True:
    line = requests.readline()
    if not line:
        break
    head = json.loads(line)
    done, data = respond(head, requests.read(head["size"]))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for drain in drains:
            drain.settle()
    except (OSError, ValueError):  # code that closed what it prints to
        pass
    send("done", data, **done)
