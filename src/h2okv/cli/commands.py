"""The commands by name: the only place where the product names the laboratory.

A command's module is imported when the command runs: torch and transformers take seconds.
"""

COMMANDS = {
    "generate": ("h2okv.cli.generate:generate", "Generate text with an H2O cache."),
    "demo": (
        "h2okv.cli.generate:demo",
        "Compare caches of 20 % with the full cache on a sample text.",
    ),
    "chat": ("h2okv.cli.chat:chat", "Chat with a model in constant KV memory."),
    "serve": (
        "h2okv.cli.serve:serve",
        "Serve a model over OpenAI's API, each request with an H2O cache.",
    ),
    "batch": ("h2okv.cli.batch:batch", "Generate for a file of prompts."),
    "plan": ("h2okv.cli.batch:plan", "Plan a batch job: weights, batch size, speed."),
    "stream": (
        "h2okv_lab.cli.stream:stream",
        "Stream an endless text or conversations through one cache.",
    ),
    "eval": ("h2okv_lab.cli.eval:eval_app", "Measure the quality of cache sizes."),
    "lm-eval": ("h2okv_lab.cli.eval:lm_eval", "Run lm-evaluation-harness with an H2O cache."),
    "bench": (
        "h2okv_lab.cli.bench:bench",
        "Measure speed and memory against transformers' own caches.",
    ),
    "analyze": (
        "h2okv_lab.cli.analyze:analyze",
        "Measure what the paper observed, and write a report.",
    ),
    "view": ("h2okv_lab.cli.analyze:view", "Show which tokens of a text a policy keeps."),
    "models": ("h2okv.cli.env:models_app", "Fetch and list the models that h2okv knows by name."),
    "env": ("h2okv.cli.env:env", "Show the installed packages, and which kernels run attention."),
}
"""The function or group of each command, and its line in `h2okv --help`."""

HELP_PACKAGES = ("h2okv.cli", "h2okv_lab.cli")
"""The packages with a help.md, which has the commands' help."""
