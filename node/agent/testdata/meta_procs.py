# Processes, signals, timers and clocks. See meta_runner.py.
#
# blocked() has children wait in a system call made straight from libc: Python
# itself hides an EINTR, and a program that is not Python must not see one
# because somebody saved the machine it runs on.


def stat_of(pid):
    with open("/proc/%d/stat" % pid) as f:
        head, tail = f.read().rsplit(")", 1)
    t = tail.split()
    return head.split("(", 1)[1], t[0], int(t[1]), int(t[2]), int(t[3])


def asleep(pid):
    return stat_of(pid)[1] in "SD"


def fork(child):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(99)
    return pid


def state(pid):
    try:
        return stat_of(pid)[1]
    except FileNotFoundError:
        return "gone"


def settled():
    """Nobody but this process is doing anything, nor will by itself: a call with
    a time limit is over, or how long everything took would show."""
    others = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
    limited = [int(f[6:]) for f in os.listdir(RUN) if f.startswith("limit-")]
    return all(state(p) != "R" for p in others) and all(state(p) in ("Z", "gone") for p in limited)


@op
def procs():
    "Every process: who it is, whose child, what it has open."
    until(settled, "quiet")
    out = []
    for pid in sorted(int(p) for p in os.listdir("/proc") if p.isdigit()):
        comm, state, ppid, pgrp, sid = stat_of(pid)
        line = "%d %s ppid %d pgrp %d sid %d" % (pid, comm, ppid, pgrp, sid)
        line += " " + {"T": "stopped", "Z": "zombie"}.get(state, "")
        with open("/proc/%d/status" % pid) as f:
            st = dict(l.split(":", 1) for l in f.read().splitlines() if ":" in l)
        for k in "Threads", "Uid", "Gid", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "CapEff", "NoNewPrivs", "Seccomp":
            if k in st:
                line += " %s %s" % (k, ",".join(st[k].split()))
        if state != "Z" and pid != 1:
            fds = []
            for fd in os.listdir("/proc/%d/fd" % pid):
                try:
                    target = os.readlink("/proc/%d/fd/%s" % (pid, fd))
                    fds.append(fd + "=" + target.split(":[")[0].rstrip("0123456789"))
                except FileNotFoundError:
                    pass  # the one that lists them
            line += " cwd %s exe %s fds %s" % (os.readlink("/proc/%d/cwd" % pid), os.readlink("/proc/%d/exe" % pid), " ".join(sorted(fds)))
        out.append(line)
    return "\n".join(out)


# Children in every state a process can be left in.
@op
def kid(slot, how, arg="7"):
    if how == "zombie":
        S[slot] = fork(lambda: os._exit(int(arg)))
        until(lambda: stat_of(S[slot])[1] == "Z", "a zombie")
    elif how == "stopped":
        # In a group of its own, whose parent is of its session: the group of an
        # exec or of a holder is an orphan, and when anybody in an orphaned group
        # with a stopped member ends, gVisor hangs up all of it (sessions.go,
        # handleOrphan). Linux does so only when a group becomes an orphan.
        S[slot] = fork(lambda: (os.setpgid(0, 0), os.kill(os.getpid(), signal.SIGSTOP), os._exit(int(arg))))
        until(lambda: stat_of(S[slot])[1] == "T", "stopped")
    elif how == "session":
        S[slot] = fork(lambda: (os.setsid(), signal.pause()))
        until(lambda: stat_of(S[slot])[4] == S[slot], "a session")
    elif how == "env":
        S[slot] = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {"COVE_META": arg})
        until(lambda: stat_of(S[slot])[:2] == ("sleep", "S"), "a sleeper")
    return "pid", S[slot]


@op
def kidsee(slot):
    p = S[slot]
    until(lambda: stat_of(p)[1] != "R", "quiet")
    comm, state, ppid, pgrp, sid = stat_of(p)
    with open("/proc/%d/environ" % p) as e, open("/proc/%d/cmdline" % p) as c:
        return comm, state, ppid == os.getpid(), pgrp == p, sid == p, "COVE_META=" in e.read(), c.read().split("\0")[0]


@op
def kidend(slot, sig):
    p = S.pop(slot)
    os.kill(p, int(sig))
    _, st = os.waitpid(p, 0)
    return "signal %d" % os.WTERMSIG(st) if os.WIFSIGNALED(st) else "exit %d" % os.WEXITSTATUS(st)


# Signals: handled, counted, blocked and pending.
@op
def sighandle(slot):
    S[slot] = []
    signal.signal(signal.SIGUSR2, lambda *_: S[slot].append(1))


@op
def sigself(slot, n):
    for _ in range(int(n)):
        os.kill(os.getpid(), signal.SIGUSR2)
    return len(S[slot])


@op
def sigblock(n):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGRTMIN])
    os.kill(os.getpid(), signal.SIGUSR1)
    for _ in range(int(n)):
        os.kill(os.getpid(), signal.SIGRTMIN)  # these queue up


@op
def sigtake():
    got = []
    while True:
        i = signal.sigtimedwait([signal.SIGUSR1, signal.SIGRTMIN], 0)
        if i is None:
            return got
        got.append((int(i.si_signo), i.si_code, i.si_pid == os.getpid(), i.si_uid))


@op
def thread(slot):
    import queue, threading

    q, a = queue.SimpleQueue(), queue.SimpleQueue()

    def count():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        total = 0
        a.put(total)
        while True:
            total += q.get()
            a.put(total)

    threading.Thread(target=count, daemon=True).start()
    S[slot] = q, a
    return a.get(timeout=30)


@op
def threadadd(slot, n):
    S[slot][0].put(int(n))
    return S[slot][1].get(timeout=30)


# A shell that counts the lines of a fifo.
@op
def shell(slot):
    p = "/w/sh" + slot
    os.mkfifo(p + ".req")
    os.mkfifo(p + ".rep")
    script = 'exec 3<>"$0.req"; i=0; while read -r x <&3; do i=$((i+1)); echo "$i $x $$ $PWD" >"$0.rep"; done'
    S[slot] = p, os.posix_spawn("/bin/bash", ["bash", "-c", script, p], os.environ, setpgroup=0)
    return S[slot]


@op
def shellsay(slot, text):
    with open(S[slot][0] + ".req", "w") as f:
        f.write(text + "\n")
    with open(S[slot][0] + ".rep") as f:
        return f.read().strip()


@op
def sh(*words):
    r, w = os.pipe()
    p = os.posix_spawn("/bin/sh", ["sh", "-c", " ".join(words)], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, w, 1), (os.POSIX_SPAWN_DUP2, w, 2)])
    os.close(w)
    with os.fdopen(r) as f:
        out = f.read()
    return out, os.waitpid(p, 0)[1]


# Clocks. The times themselves go to the test beside the observations.
def clocks():
    return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.process_time()


@op
def clock(slot):
    S[slot] = clocks(), time.time() - time.monotonic()


@op
def clocksee(slot):
    was, apart = S[slot]
    now = clocks()
    S[slot] = now, apart
    print("@real %.6f" % time.time()) if os.getpid() == ME else None
    # Both clocks go on by the real time that passed, so they stay as far apart
    # as they were; a second is much less than a clock that was set anew shows.
    return "back" if any(a > b for a, b in zip(was, now)) else "on", abs(time.time() - time.monotonic() - apart) < 1


@op
def timer(slot, seconds):
    # A process has one. Whether a short one fired before the next plot set it
    # anew is a matter of time.
    if "timer" in S:
        return "set as", S["timer"]
    S["timer"] = slot
    S[slot] = []
    signal.signal(signal.SIGALRM, lambda *_: S[slot].append(1))
    signal.setitimer(signal.ITIMER_REAL, float(seconds))


@op
def timersee(slot):
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    return "fired %d" % len(S[slot]), "left" if left > 0 else "done", left < 1000


OPS["timerwait"] = lambda slot: (until(lambda: S[slot], "an alarm"), timersee(slot))[1]


# Children in system calls that block. Each entry makes what it waits on and
# returns the call and what ends it; the call returns what libc did.
def calls(how, libc, c):
    r, w = os.pipe()
    buf = c.create_string_buffer(64)
    go = lambda pid: os.write(w, b"x")
    ms = 300  # ends by itself
    if how == "read":
        return lambda: libc.read(r, buf, 64), go
    if how == "readv":
        return lambda: libc.readv(r, struct.pack("QQ", c.addressof(buf), 64), 1), go
    if how == "write":
        os.set_blocking(w, False)
        while True:
            try:
                os.write(w, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(w, True)
        return lambda: libc.write(w, b"y" * 100, 100), lambda pid: os.read(r, 65536)
    if how in ("poll", "polltime"):
        return lambda: libc.poll(struct.pack("ihh", r, 1, 0), 1, -1 if how == "poll" else ms), go if how == "poll" else None
    if how in ("select", "selecttime"):
        bits = c.create_string_buffer(128)
        bits[r // 8] = 1 << r % 8
        tv = struct.pack("qq", 0, ms * 1000) if how == "selecttime" else None
        return lambda: libc.select(r + 1, bits, None, None, tv), go if how == "select" else None
    if how in ("epoll", "epolltime"):
        e = select.epoll()
        e.register(r, select.EPOLLIN)
        KEEP.append(e)
        return lambda: libc.epoll_wait(e.fileno(), buf, 1, -1 if how == "epoll" else ms), go if how == "epoll" else None
    if how in ("nanosleep", "clocksleep"):
        if how == "nanosleep":
            return lambda: libc.nanosleep(struct.pack("qq", 0, ms * 1000000), None), None
        at = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + ms * 1000000
        return lambda: libc.clock_nanosleep(1, 1, struct.pack("qq", *divmod(at, 10**9)), None), None
    if how == "flock":
        fds = [os.open("/w/blocked", os.O_RDWR | os.O_CREAT) for _ in "ab"]
        fcntl.flock(fds[0], fcntl.LOCK_EX)
        return lambda: (os.close(fds[0]), libc.flock(fds[1], 2))[1], lambda pid: fcntl.flock(fds[0], fcntl.LOCK_UN)
    if how == "lockf":
        fd = os.open("/w/blocked2", os.O_RDWR | os.O_CREAT)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        return lambda: libc.fcntl(fd, 7, struct.pack("hhqqi4x", 1, 0, 0, 0, 0)), lambda pid: fcntl.lockf(fd, fcntl.LOCK_UN)
    if how in ("accept", "recv", "recvtime", "recvtcp"):
        l = socket.create_server(("127.0.0.1", 0))
        a, b = socket.socketpair()
        KEEP.extend((l, a, b))
        if how == "accept":
            return lambda: 0 if libc.accept(l.fileno(), None, None) > 0 else -1, lambda pid: KEEP.append(socket.create_connection(l.getsockname()))
        if how == "recvtcp":
            a = socket.create_connection(l.getsockname())
            b, _ = l.accept()
            KEEP.extend((a, b))
        if how == "recvtime":
            b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 0, ms * 1000))
            return lambda: libc.recv(b.fileno(), buf, 64, 0), None
        return lambda: libc.recv(b.fileno(), buf, 64, 0), lambda pid: a.send(b"abc")
    if how == "futex":
        m = mmap.mmap(-1, 4096)
        KEEP.append(m)
        word = c.byref(c.c_int.from_buffer(m))
        wake = lambda pid: until(lambda: libc.syscall(202, word, 1, 1, None, None, 0), "a waiter")
        return lambda: libc.syscall(202, word, 0, 0, None, None, 0), wake
    if how == "futextime":
        m = mmap.mmap(-1, 4096)
        KEEP.append(m)
        return lambda: libc.syscall(202, c.byref(c.c_int.from_buffer(m)), 0, 0, struct.pack("qq", 0, ms * 1000000), None, 0), None
    if how == "eventfd":
        e = os.eventfd(0)
        return lambda: libc.read(e, buf, 8), lambda pid: os.eventfd_write(e, 1)
    if how == "timerfd":
        t = libc.timerfd_create(1, 0)
        libc.timerfd_settime(t, 0, struct.pack("qqqq", 0, 0, 0, ms * 1000000), None)
        return lambda: libc.read(t, buf, 8), None
    if how == "inotify":
        i = libc.inotify_init1(0)
        os.mkdir("/w/watched")
        libc.inotify_add_watch(i, b"/w/watched", 0x100)
        return lambda: 0 if libc.read(i, buf, 64) > 0 else -1, lambda pid: put("/w/watched/x", "x", os.O_WRONLY)
    if how == "tty":
        m, s = os.openpty()
        return lambda: libc.read(s, buf, 64), lambda pid: os.write(m, b"line\n")
    if how == "fifo":
        os.mkfifo("/w/blockedfifo")
        return lambda: 0 if libc.open(b"/w/blockedfifo", 0) > 0 else -1, lambda pid: KEEP.append(os.open("/w/blockedfifo", os.O_WRONLY))
    if how == "wait":
        pids = os.pipe()

        def wait():
            k = fork(lambda: (signal.pthread_sigmask(signal.SIG_SETMASK, []), signal.pause()))
            os.write(pids[1], struct.pack("i", k))
            return k - libc.waitpid(k, None, 0)

        return wait, lambda pid: os.kill(struct.unpack("i", os.read(pids[0], 4))[0], signal.SIGTERM)
    if how == "msgrcv":
        q = libc.msgget(0, 0o1600)
        return lambda: libc.msgrcv(q, buf, 8, 0, 0), lambda pid: libc.msgsnd(q, struct.pack("q8s", 1, b"message"), 8, 0)
    if how == "semop":
        s = libc.semget(0, 1, 0o1600)
        return lambda: libc.semop(s, struct.pack("Hhh", 0, -1, 0), 1), lambda pid: libc.semop(s, struct.pack("Hhh", 0, 1, 0), 1)
    if how == "sigwait":
        return lambda: libc.sigwaitinfo(struct.pack("Q120x", 1 << 9), None), lambda pid: os.kill(pid, signal.SIGUSR1)
    if how == "pause":
        return lambda: (signal.signal(signal.SIGUSR2, lambda *_: None), libc.pause())[1], lambda pid: os.kill(pid, signal.SIGUSR2)
    raise ValueError(how)


# These return EINTR after a pause or a checkpoint, as most of them do on Linux
# after a SIGCONT (signal(7)); docs/state.md names them. A program that calls
# them again must not have missed anything.
INTERRUPTED = "epoll", "epolltime", "msgrcv", "semop", "sigwait", "fifo"


@op
def blocked(slot, how):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # for sigwait
    call, end = calls(how, libc, ctypes)
    r, w = os.pipe()

    def child():
        ret = call()
        while ret < 0 and how in INTERRUPTED and ctypes.get_errno() == errno.EINTR:
            ret = call()
        os.write(w, ("%d %s" % (ret, errno.errorcode.get(ctypes.get_errno()) if ret < 0 else "")).encode())
        os._exit(0)

    pid = fork(child)
    S[slot] = pid, end, r
    if end:
        # Twice: it may sleep on its way there.
        for _ in "ab":
            until(lambda: asleep(pid), how)
            time.sleep(0.002)
    else:
        os.close(os.open("%s/limit-%d" % (RUN, pid), os.O_CREAT))  # for settled
    return "pid", pid


@op
def unblock(slot):
    pid, end, r = S.pop(slot)
    if end:
        early = select.select([r], [], [], 0)[0]
        end(pid)
    out = os.read(r, 100).decode()
    os.waitpid(pid, 0)
    os.close(r)
    return out, "early" if end and early else ""


@op
def sysv(slot, text):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    i = libc.shmget(4711 + int(slot), 4096, 0o1600)
    at = libc.shmat(i, None, 0)
    ctypes.memmove(at, text.encode(), len(text))
    libc.shmctl(i, 0, None)  # gone with its last process
    S[slot] = ctypes, at, len(text)


OPS["sysvget"] = lambda slot: S[slot][0].string_at(S[slot][1], S[slot][2])

ME = os.getpid()
main()
