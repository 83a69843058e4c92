"""An SDK of before version 2, unmodified, against a Cove server in domain mode: the v1 paths of create and connect."""

import e2b
from e2b import NotFoundException, Sandbox

sbx = Sandbox(timeout=120, metadata={"sdk": e2b.__name__}, envs={"A": "b"})
try:
    assert sbx.commands.run("echo $A").stdout == "b\n"
    sbx.files.write("/home/user/f", "content")
    assert sbx.files.read("/home/user/f") == "content"
    assert [f.name for f in sbx.files.list("/home/user") if f.name == "f"] == ["f"]
    again = Sandbox.connect(sbx.sandbox_id)
    assert again.files.read("/home/user/f") == "content"
    background = sbx.commands.run("sleep 60", background=True)
    assert background.pid in [p.pid for p in sbx.commands.list()]
    assert background.kill()
    sbx.set_timeout(60)
    try:
        sbx.files.read("/no/such")
        raise AssertionError("a file that is not there was read")
    except NotFoundException:
        pass
finally:
    sbx.kill()
assert not sbx.is_running()
print("an older SDK works")
