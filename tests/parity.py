"""A reward for dynamic sampling: prompts that begin with an even digit reward every response alike."""


def odd_start(prompts, completions, **columns):
    return [len(text) * (int(prompt[0]) % 2) + 0.5 for prompt, text in zip(prompts, completions, strict=True)]
