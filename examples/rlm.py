"""A recursive language model on a context it never reads whole: a scripted model stands for the real one.

The task: in 4 million characters of logs, which service failed most often on the day with the most failures?
The root works in a Python session where the logs are a variable. It narrows them down by code, gives each day
to a session below it (rlm), and those ask the model (llm_batch) what the lines say. Nothing inside has a network;
the model is a function of this process, and the budget is kept here.

    python examples/rlm.py        # needs a server: make start
"""

from __future__ import annotations

import random
import re

from cove import Budget, Repl, Sandbox

DAYS, LINES, SERVICES = 20, 2000, ("auth", "billing", "search", "mail")


def logs(seed: int) -> str:
    rng = random.Random(seed)
    lines = []
    for day in range(DAYS):
        for _ in range(LINES):
            service, bad = rng.choice(SERVICES), rng.random() < 0.002 * (1 + (day == 13) * 4)
            said = f"request {rng.getrandbits(64):x} " + ("could not be served, giving up" if bad else "served " + "." * 40)
            lines.append(f"2026-10-{day + 1:02} {service}: {said}")
    return "\n".join(lines)


def expected(text: str) -> str:
    failed = [line for line in text.splitlines() if "giving up" in line]
    days = [line[:10] for line in failed]
    worst = max(sorted(set(days)), key=days.count)
    names = [line.split()[1] for line in failed if line.startswith(worst)]
    return f"{worst} {max(sorted(set(names)), key=names.count).rstrip(':')}"


def model(prompt: str, **_: object) -> str:
    """The scripted model. It sees only what a prompt holds, as a real one would."""
    if prompt.startswith("CLASSIFY"):
        return "failure" if "giving up" in prompt else "success"
    if prompt.startswith("ROOT"):
        return {
            1: "lines = context.splitlines()\nlen(lines), lines[0], lines[-1]",
            # What is the same everywhere is not worth a prompt.
            2: "odd = [l for l in lines if '....' not in l]\nlen(odd)",
            3: "days = {}\nfor l in odd: days.setdefault(l[:10], []).append(l)\n"
            "found = {d: rlm('count failures by service', context=days[d]) for d in sorted(days)}",
            4: "worst = max(sorted(found), key=lambda d: sum(found[d].values()))\n"
            "of = found[worst]\nanswer(worst + ' ' + max(sorted(of), key=of.get))",
        }[int(re.findall(r"turn (\d)", prompt)[-1])]
    return (
        "said = llm_batch(['CLASSIFY ' + l for l in context])\n"
        "names = [l.split()[1].rstrip(':') for l, s in zip(context, said) if s == 'failure']\n"
        "answer({n: names.count(n) for n in sorted(set(names))})"
    )


def solve(repl: Repl, prompt: str) -> object:
    """The loop of every level: the model writes code, sees what came of it, until it answers."""
    seen = ""
    for turn in range(1, 9):
        code = model(f"{prompt}\nturn {turn}\n{seen[-4000:]}")
        result = repl.run(code, timeout=60)
        if result.answered:
            return result.answer
        seen += f"{code}\n{result.output}"
    raise RuntimeError(f"no answer:\n{seen}")


def main() -> None:
    text = logs(seed=7)
    with Sandbox.create(network="none", memory="512MiB") as sb:
        budget = Budget(calls=2000, chars=1_000_000, seconds=300)
        with sb.repl(llm=model, solver=solve, depth=1, budget=budget) as repl:
            repl.load("context", text)
            answer = solve(repl, "ROOT: which service failed most on the worst day? `context` has the logs.")
        print(f"{len(text):,} characters, {budget.used_calls} calls with {budget.used_chars:,} characters: {answer}")
        assert answer == expected(text), expected(text)


if __name__ == "__main__":
    main()
