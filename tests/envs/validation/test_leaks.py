"""Which prompts give the answer away, and which only happen to hold it. Pure."""

import random

import pytest

from telescope_core.probes.leakage import Shown, find_leaks

RNG = random.Random(0)
SUMS = [(RNG.randint(2, 60), RNG.randint(2, 60)) for _ in range(16)]
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Cuba": "Havana",
    "Egypt": "Cairo",
}


def sums(text):
    return [
        Shown(example_id=f"{a}+{b}", text=text.format(a=a, b=b, c=a + b), answers=(str(a + b),))
        for a, b in SUMS
    ]


def capitals(text):
    return [
        Shown(example_id=land, text=text.format(land=land, city=city), answers=(city,))
        for land, city in CAPITALS.items()
    ]


@pytest.mark.parametrize(
    "text",
    [
        "What is {a} + {b}? The answer is {c}.",
        "What is {a} + {b}? (answer: {c})",
        "{c}\nWhat is {a} + {b}?",
        "What is {a} + {b}? {c}",
        "Reference {c}. What is {a} + {b}?",
        "What is {a} + {b}? <!-- {c} -->",
        'What is {a} + {b}? {{"expected": "{c}"}}',
    ],
)
def test_planted_leaks_of_numbers_are_found(text):
    assert find_leaks(sums(text))


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of {land}? It begins like {city} does.",
        "You are a tutor. The solution is {city}.\nWhat is the capital of {land}?",
        "What is the capital of {land}?\ngold: {city}",
    ],
)
def test_planted_leaks_of_text_are_found(text):
    assert find_leaks(capitals(text))


@pytest.mark.parametrize(
    "text",
    [
        "What is {a} + {b}?",
        "What is {a} + {b}? For instance, if the answer is 7, write \\boxed{{7}}.",
        "Numbers: {a}, {b}. Target: 50. Which sum do they have?",
        "Add 1 and 2 and 3 and 4 and 5 and 6 and 7 and 8 to {a} and {b}.",
    ],
)
def test_numbers_that_are_there_by_chance_are_no_leak(text):
    assert find_leaks(sums(text)) == []


def test_a_rule_is_named_once_even_if_its_words_are_first_and_last():
    texts = [leak.text for leak in find_leaks(sums("Of {a} and {b} please send {c}, {a}, {b}."))]
    assert any("after 'please send'" in text for text in texts)
    assert len(texts) == len(set(texts))


def test_one_announcement_is_enough():
    shown = capitals("What is the capital of {land}?")
    shown[3] = Shown(
        example_id="Kenya", text="The capital of Kenya? Answer: Nairobi", answers=("Nairobi",)
    )
    (leak,) = find_leaks(shown)
    assert leak.example_id == "Kenya"
    assert "Answer: Nairobi" in leak.text


def test_choices_and_words_of_a_constant_prompt_are_no_leak():
    cities = list(CAPITALS.values())
    rng = random.Random(1)
    chosen = []
    for land, city in CAPITALS.items():
        four = [city, *rng.sample([other for other in cities if other != city], 3)]
        rng.shuffle(four)
        options = " ".join(f"{letter}) {name}" for letter, name in zip("ABCD", four, strict=True))
        text = f"What is the capital of {land}? {options}"
        chosen.append(Shown(example_id=land, text=text, answers=(city,)))
    assert find_leaks(chosen) == []
    hidden = [
        Shown(example_id=word, text="Guess a word: right place, other place.", answers=(word,))
        for word in ("place", "guess", "right", "other", "cedar", "daisy")
    ]
    assert find_leaks(hidden) == []


def test_yes_or_no_is_no_leak():
    shown = [
        Shown(example_id=str(i), text=f"Is {i} even? Answer yes or no.", answers=(answer,))
        for i, answer in enumerate(["yes", "no"] * 6)
    ]
    assert find_leaks(shown) == []


def test_reading_comprehension_is_no_leak():
    rng = random.Random(2)
    told = "the old town had many people who came from far away and told long stories"
    filler = told.split()
    shown = []
    for land, city in CAPITALS.items():
        words = rng.choices(filler, k=40)
        words.insert(rng.randrange(40), city)
        shown.append(
            Shown(example_id=land, text=f"{' '.join(words)}. Which city?", answers=(city,))
        )
    assert find_leaks(shown) == []
