"""What the first tests left: metadata, pauses without memory, ports, errors, keys, templates, volumes, async."""

import asyncio
import os
import time
import uuid

import httpx
import pytest
from conftest import URL, e2b_key, native, visit
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    RateLimitException,
    Sandbox,
    SandboxException,
    Template,
    TemplateException,
    TimeoutException,
    Volume,
    VolumeFileType,
    wait_for_port,
)

def test_metadata_of_files(sbx):
    sbx.files.write("m.txt", "x", metadata={"author": "mish"})
    assert sbx.files.get_info("m.txt").metadata == {"author": "mish"}
    # The native API has it too: it is an extended attribute.
    info = native("Files", "Stat", {"sandboxId": sbx.sandbox_id, "path": "/home/user/m.txt"})["info"]
    assert info["attributes"] == {"e2b.author": "mish"}
    sbx.files.write("m.txt", "y")
    assert sbx.files.get_info("m.txt").metadata is None
    with pytest.raises(InvalidArgumentException):
        sbx.files.write("m2.txt", "x", metadata={"large": "x" * 5000})
    assert not sbx.files.exists("m2.txt")


def test_pause_without_memory(fresh):
    snapshots = list(Sandbox.list_snapshots().next_items())
    fresh.files.write("/home/user/kept", "kept")
    fresh.commands.run("sleep 1000", background=True)
    boot = fresh.files.read("/proc/sys/kernel/random/boot_id")
    assert fresh.pause(keep_memory=False)
    assert not fresh.is_running()
    again = fresh.connect()
    assert again.files.read("/home/user/kept") == "kept"
    assert again.files.read("/proc/sys/kernel/random/boot_id") != boot
    assert again.commands.list() == []
    assert list(Sandbox.list_snapshots().next_items()) == snapshots  # what it was made with is gone


def test_ports_by_header():
    with Sandbox.create(timeout=300, network={"mask_request_host": "masked.test:${PORT}"}) as sbx:
        echo = "import http.server as h\nclass H(h.BaseHTTPRequestHandler):\n def do_GET(s): s.send_response(200); s.end_headers(); s.wfile.write(str(s.headers).encode())\nh.HTTPServer(('',8123),H).serve_forever()"
        sbx.files.write("echo.py", echo)
        sbx.commands.run("python3 echo.py", background=True)
        native("Ports", "WaitReady", {"sandboxId": sbx.sandbox_id, "port": 8123})
        res = visit(sbx, 8123, **{"X-Access-Token": "secret"})
        assert res.status_code == 200 and "Host: masked.test:8123" in res.text  # public, as with E2B
        assert "secret" not in res.text and "e2b-sandbox" not in res.text.lower()
        closed = visit(sbx, 8124)
        assert closed.status_code == 502 and closed.json()["port"] == 8124
    assert visit(sbx, 8123).json() == {"code": 502, "message": "The sandbox was not found", "sandboxId": sbx.sandbox_id}


def test_private_ports():
    with Sandbox.create(timeout=300, network={"allow_public_traffic": False}) as sbx:
        sbx.commands.run("python3 -m http.server 8123", background=True)
        native("Ports", "WaitReady", {"sandboxId": sbx.sandbox_id, "port": 8123})
        assert visit(sbx, 8123).status_code == 403
        assert visit(sbx, 8123, **{"e2b-traffic-access-token": "x"}).status_code == 403
        assert visit(sbx, 8123, **{"e2b-traffic-access-token": sbx.traffic_access_token}).status_code == 200
        with Sandbox.create(timeout=300, network={"allow_public_traffic": False}) as other:
            assert visit(other, 8123, **{"e2b-traffic-access-token": sbx.traffic_access_token}).status_code == 403


def test_ranges_and_conditions(sbx):
    sbx.files.write("r.txt", "0123456789")
    url = sbx.download_url("r.txt")
    whole = httpx.get(url)
    assert whole.text == "0123456789"
    part = httpx.get(url, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.text, part.headers["Content-Range"]) == (206, "234", "bytes 2-4/10")
    assert httpx.get(url, headers={"If-None-Match": whole.headers["ETag"]}).status_code == 304
    packed = httpx.get(url, headers={"Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip" and packed.text == "0123456789"
    shared = httpx.get(url, headers={"Origin": "https://page.test"})
    assert shared.headers["Access-Control-Allow-Origin"] == "*"
    asked = httpx.options(
        URL + "/sandboxes",
        headers={"Origin": "https://page.test", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"},
    )
    assert asked.status_code == 204 and asked.headers["Access-Control-Allow-Headers"] == "x-api-key"


def test_exceptions(sbx):
    with pytest.raises(NotFoundException):
        sbx.files.read("/no/such/file")
    with pytest.raises(NotFoundException):
        Sandbox.connect("nosuchsandbox000")
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 64)
    with pytest.raises(InvalidArgumentException):
        sbx.files.list("/etc/passwd")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        sbx.files.read("/etc")
    with pytest.raises(SandboxException, match="1s to 87600h"):
        sbx.set_timeout(10_000_000_000)
    with pytest.raises(TimeoutException):
        sbx.commands.run("sleep 30", timeout=0.5)
    with pytest.raises(SandboxException, match="not found"):
        Sandbox.create("no-such-template")
    expired = sbx.download_url("/etc/passwd", use_signature_expiration=-10)
    assert httpx.get(expired).json() == {"code": 401, "message": "signature is already expired"}


def test_a_full_disk_is_not_enough_space():
    from cove import Sandbox as Own

    own = Own.create(disk="16MiB", timeout=300)
    try:
        sbx = Sandbox.connect(own.id)
        with pytest.raises(NotEnoughSpaceException):
            sbx.files.write("/big", b"x" * (32 << 20))
    finally:
        own.kill()


def test_rights_of_keys(sbx):
    reader = native("Keys", "Create", {"name": "e2b-reader-" + uuid.uuid4().hex[:8], "role": "readonly"})["secret"]
    with pytest.raises(SandboxException, match="403"):
        Sandbox.create(api_key=e2b_key(reader))
    assert Sandbox.get_info(sbx.sandbox_id, api_key=e2b_key(reader)).sandbox_id == sbx.sandbox_id
    tenant = "e2b-" + uuid.uuid4().hex[:8]
    native("Tenants", "Create", {"name": tenant})
    foreign = native("Keys", "Create", {"name": "f", "role": "admin", "tenant": tenant})["secret"]
    with pytest.raises(NotFoundException):
        Sandbox.get_info(sbx.sandbox_id, api_key=e2b_key(foreign))
    assert not Sandbox.kill(sbx.sandbox_id, api_key=e2b_key(foreign))


def test_template(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("from the template")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_base_image()
        .copy("site", "/srv/site")
        .set_envs({"GREETING": "hello"})
        .run_cmd("echo built > /home/user/built")
        .set_workdir("/srv/site")
        .set_start_cmd("python3 -m http.server 8000", wait_for_port(8000))
    )
    logs = []
    Template.build(template, "site:v1", cpu_count=1, memory_mb=256, on_build_logs=lambda e: logs.append(e.message))
    assert any("echo built" in line for line in logs)
    assert Template.exists("site") and not Template.exists("no-such-site")
    Template.assign_tags("site:v1", ["stable"])
    assert {t.tag for t in Template.get_tags("site")} == {"v1", "stable"}
    with Sandbox.create("site:stable", timeout=300) as sbx:
        out = sbx.commands.run("curl -s localhost:8000; cat /home/user/built; echo $GREETING").stdout
        assert out == "from the templatebuilt\nhello\n"
    Template.build(Template().from_template("site:v1").run_cmd("touch /home/user/more"), "site-more", cpu_count=1, memory_mb=256)
    with Sandbox.create("site-more", timeout=300) as sbx:
        assert sbx.files.exists("/home/user/more") and sbx.files.exists("/home/user/built")
        assert sbx.commands.run("curl -s localhost:8000").stdout == "from the template"  # its parent's start command
    with Sandbox.create(" SITE-More", timeout=300) as sbx:
        assert sbx.get_info().name == "site-more" and [s.name for s in Sandbox.list().next_items() if s.sandbox_id == sbx.sandbox_id] == ["site-more"]
    volume = Volume.create("e2b-" + uuid.uuid4().hex[:8])
    try:
        # Of a template with a start command a sandbox is restored: what the memory lacks is mounted.
        with Sandbox.create("site:v1", timeout=300, volume_mounts={"/mnt/v": volume}) as sbx:
            assert sbx.commands.run("curl -s localhost:8000; echo kept > /mnt/v/f", user="root").stdout == "from the template"
            assert volume.read_file("f") == "kept\n"
            assert sbx.get_info().volume_mounts == [{"name": volume.name, "path": "/mnt/v"}]
            sbx.pause()
            sbx.connect()
            assert sbx.commands.run("cat /mnt/v/f").stdout == "kept\n"
    finally:
        Volume.destroy(volume.volume_id)
    headers = {"X-API-KEY": e2b_key(os.environ["COVE_KEY"])}
    info = httpx.get(f"{URL}/templates/site", headers=headers).json()
    assert info["templateID"] == "site" and [b["status"] for b in info["builds"]] == ["ready"]
    assert "site" in [t["templateID"] for t in httpx.get(f"{URL}/v2/templates", headers=headers).json()]
    logs = httpx.get(f"{URL}/templates/site/builds/{info['buildID']}/logs", params={"direction": "backward", "limit": 1}, headers=headers).json()["logs"]
    assert [line["message"] for line in logs] == ["Build finished"]
    with pytest.raises(Exception, match="exit") as failed:
        Template.build(Template().from_base_image().run_cmd("exit 3"), "site-bad", cpu_count=1, memory_mb=256)
    assert "steps[" not in str(failed.value)
    assert not Template.exists("site-bad")


def test_volume():
    volume = Volume.create("e2b-" + uuid.uuid4().hex[:8])
    try:
        with Sandbox.create(timeout=300, volume_mounts={"/data": volume}) as sbx:
            sbx.commands.run("echo inside > /data/f", user="root")
            assert volume.read_file("f") == "inside\n"
            volume.make_dir("/d/e", uid=1000, gid=1000, mode=0o750, force=True)
            made = volume.write_file("/d/e/g", b"\x00bytes", uid=1000, gid=1000, mode=0o600)
            assert (made.uid, made.gid, made.mode & 0o777, made.size) == (1000, 1000, 0o600, 6)
            assert sbx.commands.run("stat -c '%u:%g %a' /data/d/e /data/d/e/g", user="root").stdout == "1000:1000 750\n1000:1000 600\n"
            assert volume.update_metadata("/d/e/g", mode=0o644, uid=0).mode & 0o777 == 0o644
            assert sbx.commands.run("stat -c '%u:%g %a' /data/d/e/g", user="root").stdout == "0:1000 644\n"
        assert volume.read_file("/d/e/g", format="bytes") == b"\x00bytes"
        assert [e.name for e in volume.list("/d/e")] == ["g"]
        assert volume.get_info("/d/e").type == VolumeFileType.DIRECTORY
        for again in (lambda: volume.make_dir("/d/e"), lambda: volume.write_file("/d/e/g", "again")):
            with pytest.raises(Exception, match="409"):
                again()
        assert volume.write_file("/d/e/g", "again", force=True).size == 5
        for missing in (lambda: volume.read_file("/none"), lambda: volume.list("/none"), lambda: volume.remove("/none"), lambda: volume.update_metadata("/none", mode=0o600)):
            with pytest.raises(NotFoundException):
                missing()
        assert volume.read_file("../../../../f") == "inside\n"  # ".." ends at the volume's root
        volume.remove("/d")
        assert not volume.exists("/d/e/g")
        assert {v.volume_id for v in Volume.list()} >= {volume.volume_id}
        stolen = Volume.create("e2b-" + uuid.uuid4().hex[:8])
        try:
            url = f"{URL}/volumecontent/{volume.volume_id}/file?path=/f"
            assert httpx.get(url, headers={"Authorization": f"Bearer {stolen.token}"}).status_code == 401
            assert httpx.get(url, headers={"Authorization": f"Bearer {volume.token}"}).text == "inside\n"
        finally:
            Volume.destroy(stolen.volume_id)
    finally:
        Volume.destroy(volume.volume_id)


def test_template_in_background_logs_tags_and_cancel():
    name = "bg-" + uuid.uuid4().hex[:8]
    slow = Template().from_base_image().run_cmd("echo begun; sleep 300")
    build = Template.build_in_background(slow, name, cpu_count=1, memory_mb=256)
    assert (build.name, build.template_id) == (name, name)
    deadline, seen = time.monotonic() + 60, []
    while not any(e.message == "begun" for e in seen):
        status = Template.get_build_status(build, logs_offset=len(seen))
        assert status.status.value in ("waiting", "building") and time.monotonic() < deadline, status
        seen += status.log_entries
        time.sleep(0.1)
    assert all(e.level and e.timestamp for e in seen)
    res = httpx.delete(f"{URL}/templates/{name}", headers={"X-API-KEY": e2b_key(os.environ["COVE_KEY"])})
    assert res.status_code == 204
    while (status := Template.get_build_status(build)).status.value != "error":
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    assert status.reason.message == "the build was canceled by the client"
    assert not Template.exists(name)
    image = f"e2b-template/{name}:"
    assert not [i for i in native("Images", "List", {}).get("images", []) for n in i.get("names", []) if n.startswith(image)]

    for tags in (["v1"], ["v2", "latest"]):
        Template.build(Template().from_base_image().set_envs({"TAG": tags[0]}), name, tags=tags, cpu_count=1, memory_mb=128)
    assert {t.tag for t in Template.get_tags(name)} == {"v1", "v2", "latest"}
    for ref, tag in ((f"{name}:v1", "v1"), (f"{name}:latest", "v2"), (f"{name}:v2", "v2")):
        with Sandbox.create(ref, timeout=60) as sbx:
            assert sbx.commands.run("echo $TAG").stdout == tag + "\n"
    assert Template.assign_tags(f"{name}:v1", ["stable"]).tags == ["stable"]
    Template.remove_tags(name, ["latest"])
    assert {t.tag for t in Template.get_tags(name)} == {"v1", "v2", "stable"}
    with pytest.raises(SandboxException, match="not found"):
        Sandbox.create(f"{name}:latest")
    with pytest.raises(TemplateException, match="404"):
        Template.get_tags("no-" + name)


def test_rate_limit_is_its_own_type():
    tenant = "e2b-" + uuid.uuid4().hex[:8]
    native("Tenants", "Create", {"name": tenant, "quota": {"sandboxes": 1}})
    key = e2b_key(native("Keys", "Create", {"name": "k", "role": "admin", "tenant": tenant})["secret"])
    with Sandbox.create(timeout=60, api_key=key):
        with pytest.raises(RateLimitException):
            Sandbox.create(timeout=60, api_key=key, request_timeout=20)


def test_bad_input_leaves_nothing(sbx):
    before = {i.sandbox_id for i in Sandbox.list().next_items()}
    for metadata in ({"k": "v" * 300}, {f"k{i}": "v" for i in range(100)}, {"k" * 100: "v"}, {"bad key!": "v"}):
        with pytest.raises(SandboxException, match="400"):
            Sandbox.create(metadata=metadata)
    assert {i.sandbox_id for i in Sandbox.list().next_items()} == before
    # A path outside is a path inside: there is nothing above the sandbox's root.
    assert sbx.files.read("/../../../../etc/hostname") == sbx.files.read("/etc/hostname")
    assert sbx.files.read("../../../../../../etc/hostname") == sbx.files.read("/etc/hostname")
    sbx.commands.run("ln -sf ../../../../../../../../etc/hostname out", cwd="/home/user")
    assert sbx.files.read("out") == sbx.files.read("/etc/hostname")
    with pytest.raises(InvalidArgumentException):
        sbx.files.write("/" + "d/" * 2100 + "f", "x")
    with pytest.raises((InvalidArgumentException, SandboxException)):
        sbx.files.read("/nul\x00byte")
    signed = sbx.download_url("/etc/hostname", use_signature_expiration=60)
    assert httpx.get(signed).status_code == 200
    for changed in (signed.replace("hostname", "passwd"), signed.replace("v1_", "v1_A"), signed.replace("signature_expiration=", "signature_expiration=9")):
        assert httpx.get(changed).status_code == 401
    assert httpx.post(signed, files={"file": b"x"}).status_code == 401, "it is for reading"


async def several():
    boxes = await asyncio.gather(*(AsyncSandbox.create(timeout=300) for _ in range(3)))
    try:
        outs = await asyncio.gather(*(b.commands.run("echo async; sleep 0.1") for b in boxes))
        await boxes[0].files.write("a", "b")
        return [o.stdout for o in outs], await boxes[0].files.read("a")
    finally:
        await asyncio.gather(*(b.kill() for b in boxes))


def test_async():
    assert asyncio.run(several()) == (["async\n"] * 3, "b")
