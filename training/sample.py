"""Asks a running server ten questions: `python -m training.sample URL [--model NAME]`.

Prints a Markdown table of questions and answers, as in docs/model.md. It uses only the standard
library and works with any OpenAI-compatible server.
"""

import argparse
import json
import urllib.request

PROMPTS = (
    "Hello! Who are you?",
    "What is a river?",
    "What does it mean to borrow?",
    "Tell me a story about an owl and a map.",
    "Is a violin an instrument?",
    "What is the opposite of cheap?",
    "What is 14 plus 9?",
    "What is the capital of Norway?",
    "I am sad today. Can you cheer me up?",
    "Explain how a clock works.",
)


def ask(url: str, model: str, prompt: str, *, temperature: float, seed: int) -> str:
    """Returns the answer of a chat completion, at most 220 tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 220,
        "temperature": temperature,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask ten questions.")
    parser.add_argument("url", help="server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| question | answer |\n|---|---|")
    for prompt in PROMPTS:
        answer = ask(args.url, args.model, prompt, temperature=args.temperature, seed=args.seed)
        print(f"| {prompt} | {answer.strip().replace(chr(10), '<br>')} |", flush=True)


if __name__ == "__main__":
    main()
