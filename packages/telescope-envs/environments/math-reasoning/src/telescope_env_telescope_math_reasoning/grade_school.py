"""Grade-school level: word problems of two to four steps, answers are whole numbers."""

from random import Random

from telescope_env_telescope_math_reasoning.problem import Problem, Template, draw_from

_NAMES = (
    "Amara", "Ben", "Chloe", "Diego", "Elif", "Farid", "Grace", "Hana", "Ivan", "Jonas",
    "Keiko", "Lucia", "Mateo", "Nadia", "Omar", "Priya", "Rosa", "Samuel", "Tomas", "Yara",
)  # fmt: skip
_GOODS = (
    "apples", "pencils", "stickers", "marbles", "postcards", "buttons", "shells", "cookies",
    "beads", "stamps", "seeds", "badges",
)  # fmt: skip
_BOXES = ("boxes", "bags", "crates", "baskets", "jars", "packs")
_SHOP = (("notebook", 2, 6), ("mug", 4, 12), ("scarf", 8, 25), ("book", 6, 20), ("plant", 5, 18))


def draw_grade_school(rng: Random) -> Problem:
    """Draw one word problem."""
    return draw_from(_TEMPLATES, rng)


def _boxes_given_away(rng: Random) -> tuple[str, int]:
    name, friend = rng.sample(_NAMES, 2)
    goods, boxes = rng.choice(_GOODS), rng.choice(_BOXES)
    count, each = rng.randint(3, 12), rng.randint(4, 15)
    given = rng.randint(5, count * each - 2)
    return (
        f"{name} has {count} {boxes} with {each} {goods} in each. {name} gives {given} {goods} "
        f"to {friend}. How many {goods} does {name} have left?"
    ), count * each - given


def _change_from_bill(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    (first, low, high), (second, low_2, high_2) = rng.sample(_SHOP, 2)
    price, price_2 = rng.randint(low, high), rng.randint(low_2, high_2)
    count, count_2 = rng.randint(2, 5), rng.randint(2, 5)
    total = price * count + price_2 * count_2
    bill = next(bill for bill in (50, 100, 200, 500) if bill > total)
    return (
        f"{name} buys {count} {first}s at ${price} each and {count_2} {second}s at ${price_2} "
        f"each, and pays with ${bill}. How many dollars of change does {name} get?"
    ), bill - total


def _two_speeds(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    speed, hours = rng.randint(8, 24), rng.randint(2, 5)
    speed_2, hours_2 = rng.randint(4, speed - 2), rng.randint(2, 4)
    return (
        f"{name} cycles for {hours} hours at {speed} kilometres per hour and then, on a hilly "
        f"road, for {hours_2} hours at {speed_2} kilometres per hour. How many kilometres does "
        f"{name} cycle altogether?"
    ), speed * hours + speed_2 * hours_2


def _shared_equally(rng: Random) -> tuple[str, int]:
    names = rng.sample(_NAMES, 2)
    goods = rng.choice(_GOODS)
    friends, each = rng.randint(3, 9), rng.randint(3, 12)
    found = rng.randint(2, friends * each - 2)
    return (
        f"{names[0]} finds {found} {goods} and {names[1]} finds {friends * each - found}. They "
        f"put all the {goods} together and share them equally among {friends} children. How many "
        f"{goods} does each child get?"
    ), each


def _times_as_many(rng: Random) -> tuple[str, int]:
    first, second, third = rng.sample(_NAMES, 3)
    goods = rng.choice(_GOODS)
    base, factor, more = rng.randint(3, 20), rng.randint(2, 5), rng.randint(2, 15)
    return (
        f"{first} has {base} {goods}. {second} has {factor} times as many {goods} as {first}, and "
        f"{third} has {more} more than {second}. How many {goods} do the three have together?"
    ), base + factor * base + factor * base + more


def _weekly_savings(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    thing = rng.choice(("bicycle", "guitar", "telescope", "tent", "camera"))
    weekly, weeks, start = rng.randint(5, 25), rng.randint(4, 15), rng.randint(10, 80)
    price = start + weekly * weeks
    return (
        f"A {thing} costs ${price}. {name} has already saved ${start} and saves ${weekly} every "
        f"week. After how many weeks can {name} buy the {thing}?"
    ), weeks


def _rows_in_a_hall(rng: Random) -> tuple[str, int]:
    rows, seats = rng.randint(6, 20), rng.randint(8, 24)
    broken = rng.randint(2, 12)
    visitors = rng.randint(rows * seats // 3, rows * seats - broken - 1)
    return (
        f"A hall has {rows} rows of {seats} seats. {broken} seats are broken and cannot be used. "
        f"{visitors} people sit down. How many usable seats stay empty?"
    ), rows * seats - broken - visitors


def _bakery_day(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    bread = rng.choice(("loaves", "rolls", "muffins", "buns"))
    batches, size = rng.randint(3, 9), rng.randint(8, 24)
    total = batches * size
    morning = rng.randint(total // 4, total // 2)
    price = rng.randint(2, 5)
    return (
        f"{name}'s bakery makes {batches} batches of {size} {bread}. It sells {morning} {bread} "
        f"in the morning and all the others in the afternoon, at ${price} each. How many dollars "
        f"does the bakery take in the afternoon?"
    ), (total - morning) * price


def _fence_around(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    width, extra, price = rng.randint(5, 30), rng.randint(2, 15), rng.randint(3, 12)
    return (
        f"{name}'s garden is a rectangle {width} metres wide and {extra} metres longer than it is "
        f"wide. A fence costs ${price} per metre. How many dollars does a fence around the whole "
        f"garden cost?"
    ), 2 * (width + width + extra) * price


def _ages(rng: Random) -> tuple[str, int]:
    young, old = rng.sample(_NAMES, 2)
    age, factor, years = rng.randint(4, 12), rng.randint(2, 5), rng.randint(3, 15)
    return (
        f"{young} is {age} years old and {old} is {factor} times as old. How old will they be "
        f"together in {years} years?"
    ), age + factor * age + 2 * years


def _percent_off(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    item, _, _ = rng.choice(_SHOP)
    percent = rng.choice((10, 20, 25, 50))
    price, count = 20 * rng.randint(1, 6), rng.randint(2, 6)
    return (
        f"A {item} costs ${price}. In the sale it is {percent}% cheaper. How many dollars does "
        f"{name} pay for {count} {item}s in the sale?"
    ), price * (100 - percent) // 100 * count


def _reading_pages(rng: Random) -> tuple[str, int]:
    name = rng.choice(_NAMES)
    first, growth, rest_days = rng.randint(8, 30), rng.randint(2, 10), rng.randint(2, 6)
    pages = rng.randint(5, 25)
    total = first + (first + growth) + rest_days * pages
    return (
        f"A book has {total} pages. {name} reads {first} pages on Monday and {growth} more than "
        f"that on Tuesday, then the same number of pages on each of the next {rest_days} days, and "
        f"has then finished it. How many pages does {name} read on each of these last days?"
    ), pages


_TEMPLATES: tuple[Template, ...] = (
    _boxes_given_away,
    _change_from_bill,
    _two_speeds,
    _shared_equally,
    _times_as_many,
    _weekly_savings,
    _rows_in_a_hall,
    _bakery_day,
    _fence_around,
    _ages,
    _percent_off,
    _reading_pages,
)
