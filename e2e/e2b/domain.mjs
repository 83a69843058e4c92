// Domain mode: E2B_DOMAIN, wildcard names, and TLS of Cove's own authority (see e2e/e2b-domain).
import assert from 'node:assert/strict'
import { test } from 'node:test'

const { Sandbox } = await import('@e2b/code-interpreter')
const older = await import('e2b1') // the last of version 1, which has no other mode

test('ports have hosts', async () => {
  const s = await Sandbox.create('base', { timeoutMs: 120_000 })
  try {
    await s.files.write('index.html', 'a page')
    await s.commands.run('python3 -m http.server 8000', { background: true })
    const url = `https://${s.getHost(8000)}/`
    assert.ok(s.getHost(8000).startsWith(`8000-${s.sandboxId}.${process.env.E2B_DOMAIN}`))
    let text
    for (const deadline = Date.now() + 30_000; text !== 'a page';) {
      assert.ok(Date.now() < deadline, text)
      text = await (await fetch(url)).text()
    }
    assert.equal(await (await fetch(await s.downloadUrl('index.html'))).text(), 'a page')
  } finally {
    await s.kill()
  }
})

test('the code interpreter', async () => {
  const s = await Sandbox.create({ timeoutMs: 120_000, envs: { OF_THE_SANDBOX: 'yes' } })
  try {
    const e = await s.runCode('import os; print("out"); os.environ["OF_THE_SANDBOX"]')
    assert.deepEqual([e.text, e.logs.stdout], ['yes', ['out\n']]) // which kernels alone do not know: it went by the operations
    const context = await s.createCodeContext({ cwd: '/tmp' })
    assert.equal((await s.runCode('import os; os.getcwd()', { context })).text, '/tmp')
  } finally {
    await s.kill()
  }
})

test('an SDK of before version 2: v1 create and connect', async () => {
  const s = await older.Sandbox.create('base', { timeoutMs: 60_000, metadata: { sdk: 'one' }, envs: { A: 'b' } })
  try {
    assert.equal((await s.commands.run('echo $A')).stdout, 'b\n')
    await s.files.write('/home/user/f', 'one')
    const again = await older.Sandbox.connect(s.sandboxId)
    assert.equal(await again.files.read('/home/user/f'), 'one')
    await assert.rejects(s.files.read('/no/such'), older.NotFoundError)
    const background = await s.commands.run('sleep 60', { background: true })
    assert.ok((await s.commands.list()).some(p => p.pid === background.pid))
    assert.equal(await background.kill(), true)
    await s.setTimeout(30_000)
  } finally {
    await s.kill()
  }
  assert.equal(await s.isRunning(), false)
})
