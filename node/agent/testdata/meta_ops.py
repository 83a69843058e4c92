# The operations on files, and what a process holds. See meta_runner.py.
import fcntl, mmap, random, resource, select, stat, struct


def put(f, text, flags):
    fd = os.open(f, flags | os.O_CREAT, 0o666)
    os.write(fd, text.encode())
    os.close(fd)
    return "ok"


def mtime(st):
    return int(st.st_mtime) if st.st_mtime < 1.2e9 else "now"  # what utime set stays


def about(st):
    return "%o %d:%d %d links %d %s" % (st.st_mode, st.st_uid, st.st_gid, 0 if stat.S_ISDIR(st.st_mode) else st.st_size, st.st_nlink, mtime(st))


def sha(b):
    return "%d bytes %s" % (len(b), b[:16]) if len(b) <= 16 else "%d bytes %08x" % (len(b), __import__("zlib").crc32(b))


OPS.update(
    write=lambda f, t: put(f, t, os.O_WRONLY | os.O_TRUNC),
    append=lambda f, t: put(f, t, os.O_WRONLY | os.O_APPEND),
    sparse=lambda f, at: (lambda fd: (os.pwrite(fd, b"end", int(at)), os.fstat(fd).st_size, os.close(fd))[1])(os.open(f, os.O_RDWR | os.O_CREAT)),
    truncate=lambda f, n: os.truncate(f, int(n)),
    rename=os.rename,
    unlink=os.unlink,
    link=os.link,
    symlink=os.symlink,
    readlink=os.readlink,
    chmod=lambda f, m: os.chmod(f, int(m, 8)),
    chown=lambda f, u, g: os.chown(f, int(u), int(g)),
    utime=lambda f, s: os.utime(f, (int(s), int(s))),
    mkdir=lambda d: os.makedirs(d),
    rmdir=os.rmdir,
    setxattr=lambda f, v: os.setxattr(f, "user.cove", v.encode()),
    getxattr=lambda f: (os.listxattr(f), os.getxattr(f, "user.cove")),
    stat=lambda f: about(os.lstat(f)),
    read=lambda f: sha(open(f, "rb").read()),
    chdir=os.chdir,
    cwd=lambda: os.getcwd(),
    umask=lambda m: "was %o" % os.umask(int(m, 8)),
    setenv=lambda k, v: os.environ.__setitem__(k, v),
    getenv=lambda k: os.environ.get(k),
    nice=lambda n: os.nice(int(n)),
    rlimit=lambda n: (resource.setrlimit(resource.RLIMIT_NOFILE, (int(n), int(n))), resource.getrlimit(resource.RLIMIT_NOFILE))[1],
    getrlimit=lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    seed=lambda n: random.seed(int(n)),
    draw=lambda: random.random(),
    uname=lambda: (os.uname().release, os.cpu_count() > 0),  # the name is the sandbox's own
)


@op
def tree(d):
    out = []
    for top, dirs, files in os.walk(d):
        for n in [""] + files + [x for x in dirs if os.path.islink(top + "/" + x)]:
            p = os.path.join(top, n)
            st = os.lstat(p)
            out.append(p + " " + about(st))
            if stat.S_ISREG(st.st_mode):
                out[-1] += " " + sha(open(p, "rb").read())
            elif stat.S_ISLNK(st.st_mode):
                out[-1] += " -> " + os.readlink(p)
    return "\n".join(sorted(out))


# Descriptors: offset, flags, a name that is gone.
@op
def open_(slot, f, how):
    flags = {"r": os.O_RDONLY, "rw": os.O_RDWR | os.O_CREAT, "a": os.O_WRONLY | os.O_APPEND | os.O_CREAT, "dir": os.O_DIRECTORY, "path": os.O_PATH}
    S[slot] = os.open(f, flags[how])
    return "fd", S[slot]


OPS.update(
    open=open_,
    fread=lambda slot, n: os.read(S[slot], int(n)),
    fwrite=lambda slot, t: os.write(S[slot], t.encode()),
    fseek=lambda slot, n: os.lseek(S[slot], int(n), 0),
    fclose=lambda slot: os.close(S.pop(slot)),
    fstat=lambda slot: (about(os.fstat(S[slot])), os.readlink("/proc/self/fd/%d" % S[slot]), "flags %o" % fcntl.fcntl(S[slot], fcntl.F_GETFL), os.get_inheritable(S[slot])),
    flist=lambda slot: sorted(os.listdir(S[slot])),
    fopenat=lambda slot, n, t: (lambda fd: (os.write(fd, t.encode()), os.close(fd))[0])(os.open(n, os.O_CREAT | os.O_WRONLY, dir_fd=S[slot])),
    flock=lambda slot, how: fcntl.flock(S[slot], (fcntl.LOCK_EX if how == "ex" else fcntl.LOCK_SH) | fcntl.LOCK_NB),
    lockf=lambda slot, a, n: fcntl.lockf(S[slot], fcntl.LOCK_EX | fcntl.LOCK_NB, int(n), int(a)),
    memfd=lambda slot, t: (S.__setitem__(slot, os.memfd_create("m")), os.write(S[slot], t.encode()), os.lseek(S[slot], 0, 0))[1],
    eventfd=lambda slot, n: S.__setitem__(slot, os.eventfd(int(n))),
    eventread=lambda slot: (os.eventfd_write(S[slot], 1), os.eventfd_read(S[slot])),
)


@op
def trylock(f, how):
    fd = os.open(f, os.O_RDWR)
    try:
        if how == "flock":
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 4, 0)
        return "free"
    finally:
        os.close(fd)


# Memory: of a file, shared or not; of nothing, shared with a child; of SysV.
@op
def mapf(slot, f, how):
    fd = os.open(f, os.O_RDWR | os.O_CREAT)
    if os.fstat(fd).st_size < 8192:
        os.truncate(fd, 8192)
    S[slot] = mmap.mmap(fd, 8192, mmap.MAP_SHARED if how == "shared" else mmap.MAP_PRIVATE)
    os.close(fd)


def there(slot, at, n):
    """How many of n bytes can be touched. Where another plot has cut the file off,
    a load or a store ends the process, as it must (SIGBUS); a system call that is
    handed the address says EFAULT, or does less."""
    fd = os.memfd_create("copy")
    try:
        with memoryview(S[slot]) as m, m[at : at + n] as part:
            return os.write(fd, part)
    finally:
        os.close(fd)


@op
def mset(slot, at, text):
    at, n = int(at), there(slot, int(at), len(text))
    S[slot][at : at + n] = text[:n].encode()
    return None if n == len(text) else "%d of %d bytes" % (n, len(text))


OPS.update(
    mget=lambda slot: sha(S[slot][: there(slot, 0, len(S[slot]))]),
    mapanon=lambda slot, n: (S.__setitem__(slot, mmap.mmap(-1, int(n))), S[slot].write(b"x" * (int(n) // 2)))[1],
    heap=lambda slot, n: S.__setitem__(slot, bytes(random.Random(int(n)).randbytes(int(n)))),
    heapsum=lambda slot: sha(S[slot]),
)


# Bytes on their way: pipes, sockets, terminals.
@op
def pipe(slot, text):
    S[slot] = r, w = os.pipe()
    os.set_blocking(r, False)
    return os.write(w, text.encode()), r, w


@op
def pair(slot, how, text):
    "Two connected sockets, text sent and not read; how is unix, dgram, tcp or backlog."
    if how in ("tcp", "backlog"):
        l = socket.create_server(("127.0.0.1", 0))
        a = socket.create_connection(l.getsockname())
        b = None
        if how == "tcp":
            b, _ = l.accept()
            l = None
    elif how == "udp":
        l, b = None, socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        b.bind(("127.0.0.1", 0))
        a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        a.connect(b.getsockname())
    else:
        l, (a, b) = None, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM if how == "unix" else socket.SOCK_DGRAM)
    a.send(text.encode())
    S[slot] = [a, b, l]


@op
def pairrecv(slot, n):
    a, b, l = S[slot]
    if b is None:
        b, _ = l.accept()
        S[slot][1] = b
    b.settimeout(30)
    got = b.recv(int(n))
    a.settimeout(30)
    b.send(b"re:" + got) if b.type == socket.SOCK_STREAM else None
    return got, a.recv(100) if b.type == socket.SOCK_STREAM else ""


@op
def passfd(slot, f, text):
    "A descriptor in flight: nobody has it open but the socket's queue."
    a, b = socket.socketpair()
    fd = os.open(f, os.O_RDWR | os.O_CREAT)
    os.write(fd, text.encode())
    socket.send_fds(a, [b"x"], [fd])
    os.close(fd)
    os.unlink(f)
    S[slot] = a, b


@op
def takefd(slot):
    _, fds, _, _ = socket.recv_fds(S[slot][1], 1, 1)
    got = os.pread(fds[0], 100, 0), os.fstat(fds[0]).st_nlink
    os.close(fds[0])
    return got


@op
def pty(slot, text):
    import pty, termios

    m, s = pty.openpty()
    fcntl.ioctl(m, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    os.write(s, (text + "\n").encode())
    os.write(m, b"typed\npart")
    S[slot] = m, s


@op
def ptyread(slot):
    import termios

    m, s = S[slot]
    os.set_blocking(m, False)
    os.write(m, b"ial\n")
    out = os.read(m, 200)
    return out, os.read(s, 100), os.read(s, 100), struct.unpack("HHHH", fcntl.ioctl(s, termios.TIOCGWINSZ, b"\0" * 8))


@op
def epoll(slot, text, how="edge"):
    r, w = os.pipe()
    os.set_blocking(r, False)
    S[slot] = e, r, w = select.epoll(), r, w
    e.register(r, select.EPOLLIN | {"edge": select.EPOLLET, "once": select.EPOLLONESHOT}[how])
    os.write(w, text.encode())


@op
def epollwait(slot, how="drain"):
    """What is ready, read until there is no more: epoll(7) asks that of who waits
    for edges. With "keep" it stays unread, and then gVisor reports the edge once
    more after a restore (docs/state.md)."""
    e, r, _ = S[slot]
    got = []
    for _, v in e.poll(0):
        got.append("in" if v & select.EPOLLIN else v)
        try:
            while how == "drain":
                got.append(os.read(r, 20))
        except BlockingIOError:
            pass
    return got


OPS.update(
    pread=lambda slot, n: os.read(S[slot][0], int(n)),
    pwrite=lambda slot, t: os.write(S[slot][1], t.encode()),
)
