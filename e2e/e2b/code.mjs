// The published code interpreter SDK for JavaScript against a real Cove server.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'

const secret = process.env.COVE_KEY.replace(/^cove_/, '')
process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = process.env.COVE_URL
process.env.E2B_API_KEY = 'e2b_' + Buffer.from(secret, 'base64url').toString('hex')
for (const name of ['E2B_DOMAIN', 'E2B_DEBUG', 'E2B_ACCESS_TOKEN']) delete process.env[name]

const { Sandbox } = await import('@e2b/code-interpreter')
const { NotFoundError, TimeoutError } = await import('e2b')

let sbx
before(async () => { sbx = await Sandbox.create({ timeoutMs: 300_000, envs: { TEST_ENV_VAR: 'supertest' } }) })
after(async () => { await sbx?.kill() })

test('state, streams, results', async () => {
  await sbx.runCode('x = 1')
  const out = [], err = [], results = []
  const e = await sbx.runCode('import sys\nprint("hello")\nprint("oops", file=sys.stderr)\nx += 1; x', {
    onStdout: m => { out.push(m.line) }, onStderr: m => { err.push(m.line) }, onResult: r => { results.push(r.text) },
  })
  assert.equal(e.text, '2')
  assert.deepEqual([e.logs.stdout, e.logs.stderr, out, err, results], [['hello\n'], ['oops\n'], ['hello\n'], ['oops\n'], ['2']])
  assert.equal(e.executionCount, 2)
})

test('rich results and charts', async () => {
  const e = await sbx.runCode(`
    import matplotlib.pyplot as plt
    plt.bar(['a', 'b'], [1, 2], label='n')
    plt.title('T')
    plt.show()
    import pandas as pd
    pd.DataFrame({'a': [1, float('nan')]})`)
  const [figure, frame] = e.results
  assert.ok(figure.png.startsWith('iVBOR'))
  assert.deepEqual(figure.extra, {})
  assert.deepEqual([figure.chart.type, figure.chart.title], ['bar', 'T'])
  assert.deepEqual(figure.chart.elements, [{ label: 'a', group: 'n', value: 1 }, { label: 'b', group: 'n', value: 2 }])
  assert.deepEqual(frame.data, { a: [1, null] })
  assert.ok(frame.html.includes('<table'))
})

test('errors', async () => {
  const errors = []
  const e = await sbx.runCode('1 / 0', { onError: x => { errors.push(x.name) } })
  assert.deepEqual([e.error.name, e.error.value, errors], ['ZeroDivisionError', 'division by zero', ['ZeroDivisionError']])
  assert.match(e.error.traceback, /1 \/ 0/)
  await assert.rejects(sbx.removeCodeContext('nope'), NotFoundError)
})

test('languages and variables', async () => {
  assert.equal((await sbx.runCode('process.env.TEST_ENV_VAR', { language: 'js' })).text, 'supertest')
  assert.equal((await sbx.runCode('process.env.FOO', { language: 'js', envs: { FOO: 'bar' } })).text, 'bar')
  assert.equal((await sbx.runCode("process.env.FOO || 'default'", { language: 'js' })).text, 'default')
  assert.equal((await sbx.runCode('const n: number = 6; n * 7', { language: 'ts' })).text, '42')
  assert.deepEqual((await sbx.runCode('echo $TEST_ENV_VAR', { language: 'bash' })).logs.stdout, ['supertest\n'])
})

test('contexts', async () => {
  const context = await sbx.createCodeContext({ cwd: '/tmp' })
  assert.deepEqual((await sbx.listCodeContexts()).at(-1), context)
  assert.equal((await sbx.runCode('import os; y = 1; os.getcwd()', { context })).text, '/tmp')
  await sbx.restartCodeContext(context)
  assert.equal((await sbx.runCode('y', { context })).error.name, 'NameError')
  await sbx.removeCodeContext(context.id)
  await assert.rejects(sbx.runCode('1', { context }), NotFoundError)
})

test('a timeout interrupts the kernel', async () => {
  await sbx.runCode('kept = 7')
  await assert.rejects(sbx.runCode('while True: pass', { timeoutMs: 1500 }), TimeoutError)
  assert.equal((await sbx.runCode('kept')).text, '7')
})

test('a live kernel, paused and forked', async () => {
  const s = await Sandbox.create({ timeoutMs: 120_000 })
  try {
    await s.runCode('g = (n * n for n in range(9)); next(g); next(g)')
    await s.pause()
    await s.connect({ timeoutMs: 120_000 })
    const children = await s.fork({ count: 2, timeoutMs: 60_000 })
    try {
      for (const c of children) assert.equal((await c.runCode('next(g)')).text, '4')
      assert.equal((await s.runCode('next(g)')).text, '4')
    } finally {
      for (const c of children) await c.kill()
    }
  } finally {
    await s.kill()
  }
})

test('killed while code runs', async () => {
  const s = await Sandbox.create({ timeoutMs: 60_000 })
  const running = s.runCode("print('on', flush=True); import time; time.sleep(300)", { timeoutMs: 300_000, onStdout: () => { s.kill() } })
  await assert.rejects(running, e => e instanceof TimeoutError && /killed while the request was in progress/.test(e.message))
})
