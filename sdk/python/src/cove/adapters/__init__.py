"""Cove behind the sandbox interfaces of trainers and agent frameworks.

One module for each, importing its framework only when it is itself imported:
inspect (inspect_ai), harbor, minisweagent, swerex, tinker, verifiers, and
sandboxfusion, an HTTP server that answers POST /run_code. They need Python 3.10
or newer. docs/adapters.md says how each is switched on.
"""
