"""The prompts of the demo, made here: tasks times topics, in our own words.

    python examples/make_prompts.py        # writes examples/prompts/demo.jsonl

Eight kinds (explain, list, compare, story, steps, rewrite, arithmetic, code), about 310 different prompts whose
answers a small chat model gives in a natural way. No randomness: the same file every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "prompts" / "demo.jsonl"

TOPICS = (
    *("a rainbow", "the moon", "a volcano", "a bicycle", "a lighthouse", "a beehive", "a library", "a compass", "a greenhouse"),
    *("a thunderstorm", "a river", "a forest", "a desert", "an orchestra", "a telescope", "a bridge", "a windmill", "a coral reef"),
    *("a glacier", "a bakery", "a train station", "an island", "a vegetable garden", "a sailing boat", "a farm", "a museum", "a clock"),
    *("a kite", "a waterfall", "a spider web", "a candle", "a market", "a school bus", "an airport", "a hospital", "a piano"),
    *("a camera", "a hot-air balloon", "a honey bee", "an elephant"),
)
"""40 things everybody knows."""

EXPLAIN = ("Explain to a child what {} is.", "What is {}? Answer in a short paragraph.", "Why do people find {} interesting?")
LIST = ("List five facts about {}.", "Give me four words that describe {} and say why.", "Name three things one can learn from {}.")
COMPARE = ("What is the difference between {} and {}?", "Compare {} with {}. Which one would you rather draw, and why?")
STORY = (
    "Write a short story about {}.",
    "Write the first paragraph of a story in which a girl discovers {}.",
    "Write a short poem about {}.",
)

STEPS = tuple(
    f"How do I {task}? Answer in numbered steps."
    for task in (
        *("make a cup of tea", "plant a tree", "wash a car", "bake bread", "paint a wall", "pack a suitcase", "clean a window"),
        *("write a letter", "learn a new word", "start a small garden", "prepare for an exam", "cook rice", "boil an egg"),
        *("fix a flat tire", "build a sandcastle", "draw a cat", "make a salad", "organize a desk", "train a puppy", "read a map"),
        *("fold a paper plane", "take a good photo", "save money", "give a short speech", "set up a tent", "make lemonade"),
        *("clean a kitchen", "choose a book", "plan a birthday party", "water house plants", "stay calm before a test"),
        *("find a lost key", "grow tomatoes", "wrap a present", "sew on a button", "make a simple budget", "start a diary"),
    )
)

WHO = ("The old teacher", "My neighbor", "A young doctor", "The tired driver", "Our cousin", "The new gardener", "A famous painter")
DID = (
    *("walked slowly to the station", "forgot the keys at home", "was happy about the good news", "did not like the cold soup"),
    *("bought a very big house", "told us a funny story", "waited for the bus in the rain", "repaired the broken chair"),
)
REWRITE = (
    "Rewrite this sentence in a polite way: {}",
    "Rewrite this sentence in the future tense: {}",
    "Make this sentence longer and more detailed: {}",
)

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo")
GOODS = ("apples", "pencils", "stamps", "marbles", "books", "cookies", "shells", "coins", "tickets", "cards", "flowers", "stickers")
SUMS = (
    "{name} has {a} {goods} and buys {b} more. Then {name} gives {c} to a friend. How many {goods} does {name} have now?",
    "{name} fills {c} boxes with {a} {goods} each and has {b} {goods} left over. How many {goods} are there in all?",
    "A shop sells {goods} for {c} dollars each. {name} buys {a}. How much does {name} pay?",
    "{name} shares {d} {goods} equally among {c} children. How many {goods} does each child get?",
)

RESULTS = (
    *("the largest number", "the smallest number", "the sum of all numbers", "the average", "how many numbers are even"),
    *("the numbers in reverse order", "the numbers without duplicates", "the numbers that are greater than ten"),
    *("the square of each number", "the product of all numbers", "the second largest number", "the difference of the ends"),
)
STRINGS = (
    *("count the vowels in a string", "reverse a string", "check whether a word is a palindrome", "count the words in a text"),
    *("make the first letter of each word a capital", "remove all spaces from a string", "find the longest word in a sentence"),
    *("replace each digit in a string with a star", "count how often a letter occurs in a word", "join a list of words with commas"),
)
LOOPS = (
    *("print the numbers from 1 to 10", "print the multiplication table of 7", "compute the factorial of a number"),
    *("print the first ten Fibonacci numbers", "check whether a number is prime", "add the numbers from 1 to 100"),
    *("convert Celsius to Fahrenheit", "find the area of a circle", "check whether a year is a leap year", "count down from 10 to 1"),
    *("read a text file and print its lines", "sort a list of names", "find the common items of two lists", "merge two dictionaries"),
)


def prompts() -> Iterator[dict[str, Any]]:
    """Every row, `{id, category, messages}`, kinds of task taking turns."""
    by_kind = {
        "explain": [EXPLAIN[i % 3].format(topic) for i, topic in enumerate(TOPICS)],
        "list": [LIST[i % 3].format(topic) for i, topic in enumerate(TOPICS)],
        "compare": [COMPARE[i % 2].format(topic, TOPICS[(i * 7 + 5) % len(TOPICS)]) for i, topic in enumerate(TOPICS)],
        "story": [STORY[i % 3].format(topic) for i, topic in enumerate(TOPICS)],
        "steps": list(STEPS),
        "rewrite": [REWRITE[i % 3].format(f"{WHO[i % 7]} {DID[i % 8]}.") for i in range(40)],
        "arithmetic": [_sum(i) for i in range(40)],
        "code": [
            *(f"Write a Python function that takes a list of numbers and returns {result}." for result in RESULTS),
            *(f"Write a Python function to {task}." for task in STRINGS),
            *(f"Write a short Python program to {task}." for task in LOOPS),
        ],
    }
    for index in range(max(map(len, by_kind.values()))):
        for kind, texts in by_kind.items():
            if index < len(texts):
                yield {"id": f"{kind}-{index:02d}", "category": kind, "messages": [{"role": "user", "content": texts[index]}]}


def rendered() -> str:
    """The whole file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts())


def _sum(index: int) -> str:
    a, b, c = 6 + index * 5 % 23, 3 + index * 7 % 17, 2 + index // 4 % 5
    each = 3 + index * 3 % 11
    return SUMS[index % 4].format(name=NAMES[index % 12], goods=GOODS[(index * 5 + index // 12) % 12], a=a, b=b, c=c, d=each * c)


if __name__ == "__main__":
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(rendered(), encoding="utf-8")
