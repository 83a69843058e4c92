// The published JavaScript SDK against a real Cove server.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'

const secret = process.env.COVE_KEY.replace(/^cove_/, '')
process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = process.env.E2B_VOLUME_API_URL = process.env.COVE_URL
process.env.E2B_API_KEY = 'e2b_' + Buffer.from(secret, 'base64url').toString('hex')
for (const name of ['E2B_DOMAIN', 'E2B_DEBUG', 'E2B_ACCESS_TOKEN']) delete process.env[name]

const { AuthenticationError, CommandExitError, FilesystemEventType, InvalidArgumentError, NotEnoughSpaceError, NotFoundError, RateLimitError, Sandbox, SandboxError, Secret, Template, TimeoutError, Volume } = await import('e2b')

let sbx
before(async () => { sbx = await Sandbox.create({ timeoutMs: 300_000, metadata: { fixture: 'js' }, envs: { GREETING: 'hello' } }) })
after(async () => { await sbx?.kill() })

async function until(what, ms = 30_000) {
  for (const deadline = Date.now() + ms; ; await new Promise(r => setTimeout(r, 50))) {
    if (await what()) return
    assert.ok(Date.now() < deadline, `not in time: ${what}`)
  }
}

test('create, info, list, connect, kill', async () => {
  const s = await Sandbox.create({ timeoutMs: 60_000, metadata: { run: 'js one&two' } })
  assert.ok(await s.isRunning())
  const info = await s.getInfo()
  assert.equal(info.sandboxId, s.sandboxId)
  assert.equal(info.metadata.run, 'js one&two')
  assert.equal(info.state, 'running')
  const listed = await Sandbox.list({ query: { metadata: { run: 'js one&two' } } }).nextItems()
  assert.deepEqual(listed.map(i => i.sandboxId), [s.sandboxId])
  const again = await Sandbox.connect(s.sandboxId, { timeoutMs: 120_000 })
  assert.equal((await again.commands.run('echo again')).stdout, 'again\n')
  await s.setTimeout(30_000)
  const [m] = await s.getMetrics()
  assert.ok(m.memUsed > 0 && m.memTotal > m.memUsed)
  assert.equal(await s.kill(), true)
  assert.equal(await s.kill(), false)
  assert.equal(await s.isRunning(), false)
  await assert.rejects(s.commands.run('true'), NotFoundError) // the SDK's own word for a 502
  await assert.rejects(Sandbox.getInfo(s.sandboxId), NotFoundError)
})

test('typed errors', async () => {
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(64) }), AuthenticationError)
  await assert.rejects(Sandbox.create('no-such-template'), SandboxError)
  await assert.rejects(Sandbox.connect('i0000000000000000000'), NotFoundError)
  await assert.rejects(sbx.files.read('/no/such'), NotFoundError)
  await assert.rejects(sbx.files.list('/etc/passwd'), InvalidArgumentError)
  await assert.rejects(sbx.commands.run('true', { user: 'nobody-like-this' }), AuthenticationError)
  await assert.rejects(sbx.commands.run('true', { cwd: '/no/such' }), InvalidArgumentError)
})

test('commands', async () => {
  const out = []
  const r = await sbx.commands.run('echo $GREETING-$A; echo e >&2', { envs: { A: '1' }, onStdout: d => { out.push(d) } })
  assert.deepEqual([r.stdout, r.stderr, r.exitCode, out.join('')], ['hello-1\n', 'e\n', 0, 'hello-1\n'])
  await assert.rejects(sbx.commands.run('exit 7'), e => e instanceof CommandExitError && e.exitCode === 7)
  assert.equal((await sbx.commands.run('whoami', { user: 'root' })).stdout, 'root\n')
  const h = await sbx.commands.run('cat', { background: true, stdin: true })
  await sbx.commands.sendStdin(h.pid, 'typed')
  assert.ok((await sbx.commands.list()).some(p => p.pid === h.pid))
  await sbx.commands.closeStdin(h.pid)
  assert.equal((await h.wait()).stdout, 'typed')
  const bg = await sbx.commands.run('sleep 300', { background: true, timeoutMs: 0 })
  const other = await sbx.commands.connect(bg.pid)
  assert.equal(await sbx.commands.kill(bg.pid), true)
  await assert.rejects(other.wait(), CommandExitError)
  await assert.rejects(bg.wait(), CommandExitError)
  assert.equal(await sbx.commands.kill(bg.pid), false)
  await assert.rejects(sbx.commands.run('sleep 60', { timeoutMs: 500 }), TimeoutError)
})

test('pty', async () => {
  let seen = ''
  const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: d => { seen += Buffer.from(d).toString() } })
  await sbx.pty.resize(pty.pid, { cols: 100, rows: 30 })
  await sbx.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit\n'))
  await pty.wait()
  assert.match(seen, /30 100/)
})

test('files', async () => {
  const dir = '/home/user/js'
  assert.equal(await sbx.files.makeDir(dir), true)
  assert.equal(await sbx.files.makeDir(dir), false)
  const info = await sbx.files.write(`${dir}/a/b.txt`, 'ünï')
  assert.equal(info.path, `${dir}/a/b.txt`)
  assert.equal(await sbx.files.read(`${dir}/a/b.txt`), 'ünï')
  const bytes = new Uint8Array(1_000_000).map((_, i) => i)
  await sbx.files.write(`${dir}/bytes`, new Blob([bytes]))
  assert.deepEqual(await sbx.files.read(`${dir}/bytes`, { format: 'bytes' }), bytes)
  await sbx.files.write([{ path: `${dir}/m1`, data: '1' }, { path: `${dir}/m2`, data: '2' }])
  assert.deepEqual((await sbx.files.list(dir)).map(e => e.name).sort(), ['a', 'bytes', 'm1', 'm2'])
  assert.equal((await sbx.files.rename(`${dir}/m1`, `${dir}/n/m`)).path, `${dir}/n/m`)
  assert.equal((await sbx.files.getInfo(`${dir}/n/m`)).owner, 'user')
  assert.equal(await (await fetch(await sbx.downloadUrl(`${dir}/m2`))).text(), '2')
  const form = new FormData()
  form.append('file', new Blob(['up']), 'up')
  assert.equal((await fetch(await sbx.uploadUrl(`${dir}/up`), { method: 'POST', body: form })).status, 200)
  assert.equal(await sbx.files.read(`${dir}/up`), 'up')
  await sbx.files.write(`${dir}/empty`, '')
  assert.equal(await sbx.files.read(`${dir}/empty`), '')
  const events = []
  const watch = await sbx.files.watchDir(dir, e => { events.push(e) }, { recursive: true })
  await sbx.files.write(`${dir}/a/seen`, '1')
  await until(() => events.some(e => e.name === 'a/seen' && e.type === FilesystemEventType.WRITE))
  await watch.stop()
  await sbx.files.remove(dir)
  assert.equal(await sbx.files.exists(dir), false)
})

test('pause, resume and fork', async () => {
  const s = await Sandbox.create({ timeoutMs: 120_000 })
  try {
    await s.files.write('/tmp/x', 'kept')
    const bg = await s.commands.run('sleep 300', { background: true, timeoutMs: 0 })
    await bg.disconnect()
    assert.equal(await s.pause(), true)
    assert.equal(await s.pause(), false)
    assert.equal((await s.getInfo()).state, 'paused')
    await s.connect()
    assert.equal(await s.files.read('/tmp/x'), 'kept')
    assert.ok((await s.commands.list()).some(p => p.pid === bg.pid))
    const [child] = await s.fork({ timeoutMs: 60_000 })
    assert.equal(await child.files.read('/tmp/x'), 'kept')
    await child.kill()
    const snap = await s.createSnapshot()
    const from = await Sandbox.create(snap.snapshotId, { timeoutMs: 60_000 })
    assert.equal(await from.files.read('/tmp/x'), 'kept')
    await from.kill()
    assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), true)
  } finally {
    await s.kill()
  }
})

test('twenty at once', async () => {
  const made = await Promise.all(Array.from({ length: 20 }, () => Sandbox.create({ timeoutMs: 60_000 })))
  const said = await Promise.all(made.map((s, i) => s.commands.run(`echo ${i}`)))
  assert.deepEqual(said.map(r => r.stdout), made.map((_, i) => `${i}\n`))
  await Promise.all(made.map(s => s.kill()))
})

test('errors of the API and of the agent have their types', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), e => e instanceof SandboxError && /not found/.test(e.message))
  await assert.rejects(Sandbox.connect('nosuchsandbox000'), NotFoundError)
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(64) }), AuthenticationError)
  await assert.rejects(sbx.files.read('/no/such/file'), NotFoundError)
  await assert.rejects(sbx.files.list('/etc/passwd'), InvalidArgumentError)
  await assert.rejects(sbx.commands.run('sleep 30', { timeoutMs: 500 }), TimeoutError)
})

test('metadata of files, and a pause without memory', async () => {
  const s = await Sandbox.create({ timeoutMs: 120_000 })
  try {
    await s.files.write('kept', 'kept', { metadata: { author: 'mish' } })
    assert.deepEqual((await s.files.getInfo('kept')).metadata, { author: 'mish' })
    const boot = await s.files.read('/proc/sys/kernel/random/boot_id')
    await s.pause({ keepMemory: false })
    assert.equal(await s.isRunning(), false)
    await s.connect()
    assert.equal(await s.files.read('kept'), 'kept')
    assert.notEqual(await s.files.read('/proc/sys/kernel/random/boot_id'), boot)
  } finally {
    await s.kill()
  }
})

test('a hundred creates at once', async () => {
  await Template.build(Template().fromBaseImage(), 'small', { cpuCount: 1, memoryMB: 64 })
  const made = await Promise.allSettled(Array.from({ length: 100 }, () => Sandbox.create('small', { timeoutMs: 300_000, requestTimeoutMs: 100_000 })))
  const live = made.filter(m => m.status === 'fulfilled').map(m => m.value)
  try {
    assert.deepEqual(made.filter(m => m.status === 'rejected').map(m => String(m.reason)), [])
    assert.equal(new Set(live.map(s => s.sandboxId)).size, 100)
    assert.equal((await live[99].commands.run('echo last')).stdout, 'last\n')
  } finally {
    await Promise.all(live.map(s => s.kill()))
  }
})

// Cove's own API, for what E2B's has no call for.
async function native(service, method, message) {
  const res = await fetch(`${process.env.COVE_URL}/cove.v1.${service}/${method}`, {
    method: 'POST', body: JSON.stringify(message), headers: { 'Content-Type': 'application/json', Authorization: `Bearer ${process.env.COVE_KEY}` },
  })
  assert.equal(res.status, 200)
  return res.json()
}
const e2bKey = secret => 'e2b_' + Buffer.from(secret.replace(/^cove_/, ''), 'base64url').toString('hex')
const unique = name => `${name}-${Math.random().toString(36).slice(2, 10)}`

test('headers of rules, and secrets in them', async () => {
  const api = 'api.outside.test', url = `https://${api}:${process.env.OUTSIDE_PORT}/`
  const name = unique('js'), value = unique('sk-live')
  const made = await Secret.create(name, value, { metadata: { env: 'js' } })
  assert.deepEqual([made.name, made.version, made.metadata], [name, 1, { env: 'js' }])
  const rules = { [api]: [{ transform: { headers: { 'X-Team': 'rl', Authorization: `Bearer ${Secret.fill(name)}` } } }] }
  const s = await Sandbox.create({ timeoutMs: 120_000, network: { allowOut: [process.env.OUTSIDE_IP, api], denyOut: ['0.0.0.0/0'], rules } })
  try {
    const told = JSON.parse((await s.commands.run(`curl -sS --max-time 20 ${url}`)).stdout)
    assert.equal(told['x-team'], 'rl')
    assert.ok(!told.authorization.includes(value))
    assert.equal((await (await fetch(process.env.OUTSIDE_SEEN)).json()).authorization, `Bearer ${value}`)
    assert.deepEqual((await s.getInfo()).network.rules, rules)
    assert.equal((await Secret.update(name, value + '-2')).version, 2)
    assert.equal(await Secret.exists(name), true)
    assert.ok((await Secret.list().nextItems()).some(i => i.name === name))
  } finally {
    await s.kill()
    assert.equal(await Secret.destroy(name), true)
  }
  assert.equal(await Secret.destroy(name), false)
  await assert.rejects(Sandbox.create({ network: { rules } }), e => e instanceof SandboxError && e.message.includes(name))
})

test('volumes and what is in them', async () => {
  const v = await Volume.create(unique('js'))
  try {
    await v.makeDir('/d/e', { force: true, uid: 1000, gid: 1000, mode: 0o750 })
    await v.writeFile('/d/e/f', 'text', { mode: 0o600, uid: 1000 })
    assert.equal(await v.readFile('/d/e/f'), 'text')
    assert.equal((await v.updateMetadata('/d/e/f', { mode: 0o640, gid: 7 })).gid, 7)
    assert.deepEqual((await v.list('/d/e')).map(e => [e.name, e.uid, e.gid, e.mode & 0o777]), [['f', 1000, 7, 0o640]])
    await assert.rejects(v.readFile('/none'), /not found/)
    await assert.rejects(v.writeFile('/d/e/f', 'again'), /409/)
    const s = await Sandbox.create({ timeoutMs: 60_000, volumeMounts: { '/data': v } })
    try {
      assert.equal((await s.commands.run('stat -c %a:%u /data/d/e; cat /data/d/e/f', { user: 'root' })).stdout, '750:1000\ntext')
    } finally {
      await s.kill()
    }
    await v.remove('/d')
    assert.equal(await v.exists('/d/e/f'), false)
  } finally {
    assert.equal(await Volume.destroy(v.volumeId), true)
  }
})

test('templates: tags, aliases, logs, a build that fails', async () => {
  const name = unique('js'), logs = []
  const build = (tag, onBuildLogs) => Template.build(Template().fromBaseImage().setEnvs({ TAG: tag }).runCmd('echo built-it'), name, { tags: [tag], cpuCount: 1, memoryMB: 128, onBuildLogs })
  await build('v1', e => logs.push(e.message))
  await build('v2')
  assert.ok(logs.some(m => m === 'built-it'), logs.join('\n'))
  await Template.assignTags(`${name}:v1`, 'stable')
  assert.deepEqual((await Template.getTags(name)).map(t => t.tag).sort(), ['stable', 'v1', 'v2'])
  const s = await Sandbox.create(`${name}:stable`, { timeoutMs: 60_000 })
  try {
    assert.equal((await s.commands.run('echo $TAG')).stdout, 'v1\n')
  } finally {
    await s.kill()
  }
  await Template.removeTags(name, 'stable')
  await assert.rejects(Sandbox.create(`${name}:stable`), /not found/)
  assert.equal(await Template.exists(name), true)
  await assert.rejects(Template.build(Template().fromBaseImage().runCmd('exit 3'), unique('bad'), { cpuCount: 1, memoryMB: 128 }), /exit/)
})

test('quota, space, a foreign key, oversized metadata, an expired signature', async () => {
  const tenant = unique('js')
  await native('Tenants', 'Create', { name: tenant, quota: { sandboxes: 1 } })
  const apiKey = e2bKey((await native('Keys', 'Create', { name: 'k', role: 'admin', tenant })).secret)
  await assert.rejects(Sandbox.getInfo(sbx.sandboxId, { apiKey }), NotFoundError)
  assert.equal(await Sandbox.kill(sbx.sandboxId, { apiKey }), false)
  const only = await Sandbox.create({ apiKey, timeoutMs: 60_000 })
  await assert.rejects(Sandbox.create({ apiKey, timeoutMs: 60_000, requestTimeoutMs: 20_000 }), RateLimitError)
  await only.kill()
  const { sandbox } = await native('Sandboxes', 'Create', { spec: { resources: { disk: String(16 << 20) }, timeout: '120s' } })
  const small = await Sandbox.connect(sandbox.id)
  try {
    await assert.rejects(small.files.write('/big', 'x'.repeat(32 << 20)), NotEnoughSpaceError)
  } finally {
    await small.kill()
  }
  await assert.rejects(Sandbox.create({ metadata: { k: 'v'.repeat(300) } }), /400.*labels/)
  const expired = await sbx.downloadUrl('/etc/passwd', { useSignatureExpiration: -10 })
  assert.deepEqual(await (await fetch(expired)).json(), { code: 401, message: 'signature is already expired' })
  assert.equal(await sbx.files.read('/../../etc/hostname'), await sbx.files.read('/etc/hostname'))
})
