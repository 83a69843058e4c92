# Runs inside a sandbox: takes steps from its input, one per line, and prints
# what it saw of each. A step is a number, a process ("me", or a holder that was
# spawned before) and an operation with its words. What is printed must not
# depend on when or where it runs: no times, no inode numbers, sorted.
#
# meta_ops.py is appended to this file; OPS is filled there.
import errno, os, signal, socket, sys, time

OPS = {}
S = {}  # what this process holds, by slot
KEEP = []  # descriptors that stay open until the process ends
RUN = "/run/meta"


def op(f):
    OPS[f.__name__] = f
    return f


def perform(words):
    try:
        r = OPS[words[0]](*words[1:])
    except OSError as e:
        r = errno.errorcode.get(e.errno, repr(e))
    except KeyError as e:
        r = "nothing held as %s" % e
    except Exception as e:
        r = "%s: %s" % (type(e).__name__, e)
    return " ".join(str(x) for x in r) if isinstance(r, (tuple, list)) else str(r)


def until(cond, what):
    # A bound for the case that it never comes true; it does at once or soon.
    for _ in range(6000):
        v = cond()
        if v:
            return v
        time.sleep(0.005)
    raise RuntimeError("never: " + what)


# A holder is asked over what its kind says: unix, tcp, fifo. One request at a
# time, each answered before the next step.
def endpoints(name):
    return RUN + "/" + name, 7000 + int(name[1:])


def listen(kind, name):
    path, port = endpoints(name)
    if kind == "fifo":
        os.mkfifo(path + ".req")
        os.mkfifo(path + ".rep")
        req = os.open(path + ".req", os.O_RDWR)

        def serve():
            line = b""
            while not line.endswith(b"\n"):
                line += os.read(req, 1)

            def reply(b):
                rep = os.open(path + ".rep", os.O_WRONLY)
                os.write(rep, b)
                os.close(rep)

            return line, reply

        return serve
    if kind == "unix":
        s = socket.socket(socket.AF_UNIX)
        s.bind(path + ".sock")
    else:
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))
    s.listen(8)

    def serve():
        c, _ = s.accept()
        line = b""
        while not line.endswith(b"\n"):
            line += c.recv(4096)

        def reply(b):
            c.sendall(b)
            c.shutdown(socket.SHUT_WR)  # children forked meanwhile have it open too
            c.close()

        return line, reply

    return serve


def ask(name, words):
    kind = S["kinds"][name]
    path, port = endpoints(name)
    line = (" ".join(words) + "\n").encode()
    if kind == "fifo":
        req = os.open(path + ".req", os.O_WRONLY)
        os.write(req, line)
        os.close(req)
        rep = os.open(path + ".rep", os.O_RDONLY)
        f = os.fdopen(rep, "rb")
    else:
        s = socket.socket(socket.AF_UNIX) if kind == "unix" else socket.socket()
        s.connect(path + ".sock" if kind == "unix" else ("127.0.0.1", port))
        s.sendall(line)
        # The asking side ends first, and has the port in TIME_WAIT. If the
        # holder had, one connection in some thousands would meet it there with
        # an older timestamp (gVisor draws its offset), and stand for a minute.
        s.shutdown(socket.SHUT_WR)
        f = s.makefile("rb")
        s.close()
    with f:
        return f.read().decode()


@op
def spawn(name, kind, parent):
    "A process with state of its own: a child of the runner, or of init."
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        os.setsid()
        if parent == "init" and os.fork():
            os._exit(0)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in 0, 1, 2:
            os.dup2(null, fd)
        os.close(null)
        S.clear()
        serve = listen(kind, name)
        if parent == "init":
            until(lambda: os.getppid() == 1, "adopted by init")
        os.write(w, b"%d %d" % (os.getpid(), os.getppid()))
        os.close(w)
        while True:
            line, reply = serve()
            if line == b"quit\n":
                reply(b"bye")
                os._exit(3)
            reply(perform(line.decode().split()).encode())
    os.close(w)
    if parent == "init":
        os.waitpid(pid, 0)
    said = os.read(r, 100).decode()
    os.close(r)
    S.setdefault("kinds", {})[name] = kind
    return "pid, ppid " + said


def main():
    os.dup2(1, 2)  # two pipes have no order
    if os.isatty(0):
        import termios, tty

        tty.setraw(0)  # no echo, no line ends added
    os.makedirs(RUN, exist_ok=True)
    for d in "/w", "/dev/shm/w", "/tmp/w":
        os.makedirs(d, exist_ok=True)
    os.chdir("/w")
    print("== ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        words = line.split()
        if words[0] == "--":
            print("== done", flush=True)
        elif words[0] == "quit":
            break
        else:
            n, who, words = words[0], words[1], words[2:]
            obs = perform(words) if who == "me" else ask(who, words)
            print(n, who, " ".join(words), "->", obs.replace("\n", "\n    "), flush=True)
    sys.stdout.flush()
    os._exit(5)
