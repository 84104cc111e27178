"""Words for keys, facts and lists: short lists of our own, then words of the built-in text.

RULER takes its words from a package, so keys and lists differ from the published ones in wording.
"""

import functools
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from jax_longctx.evaluation.haystack import python_topics

ADJECTIVES = tuple(
    """
    amber ancient ashen azure barren bitter bleak blunt bold bouncy brave breezy brittle broad
    bronze calm candid careful charming chilly civil clever cloudy clumsy coastal cobalt copper
    coral cosy crafty creamy crimson crisp crooked cubic curly damp daring dapper deep delicate
    dense dented dim distant dizzy dusky dusty eager early earnest ebony elastic elegant emerald
    empty fabled faded fancy fearless feeble fierce flaky flat fleet flimsy floral fluffy foggy fond
    fragile frank frosty frugal fuzzy gentle giant gilded glassy gleaming gloomy glossy golden
    graceful grand grassy greedy grumpy handy hardy hasty hazel hazy hearty heavy hidden hollow
    honest humble humid hungry icy idle indigo ivory jagged jaunty jolly jovial keen kindly lanky
    lavish leafy lean lively lofty lone loud lucid lucky lunar lush mellow merry mighty mild milky
    misty modest molten mossy muddy muffled narrow neat nimble noble noisy nutty oaken odd olive
    opal orderly oval pale patient pearly peppery placid plain playful plump polar polished prickly
    prim proud pure quaint quick quiet ragged rapid rare remote restless rigid ripe rocky roomy rosy
    rough round royal ruby rugged rustic rusty salty sandy scarlet serene shabby shady shaggy sharp
    shiny shy silent silken silver simple sleek sleepy slender slim smoky smooth snowy sober soft
    solar solemn sooty sour spare spicy spiral spry square stable stately steep stern stiff stony
    stormy stout strict sturdy subtle sunny supple swift tame tangy tart tawny tepid thorny thrifty
    tidy timid tiny tough tranquil trim tropical twisted upbeat urban vague vast velvet verdant
    violet vivid wary wavy weary weird western wild windy wintry wiry wise wistful witty wobbly
    woolly worthy yellow young zany zesty
    """.split()
)

NOUNS = tuple(
    """
    acorn anchor anvil apple apron arrow atlas badge bagel bakery balcony bamboo banjo banner barley
    barrel basin basket beacon beaver bell bench berry bicycle birch biscuit blanket blossom bonnet
    bottle boulder bramble branch brick bridge brook broom bucket buckle bugle butter button cabin
    cactus camel candle canoe canyon caravan cargo carpet carrot castle cedar cellar chalk chapel
    cherry chest chimney chisel cider circus clam cliff cloak clock clover cobweb coconut comet
    compass cottage cotton cradle crane crater cricket crown crumb crystal cupboard curtain cushion
    daisy desert dolphin domino donkey dragon drawer drum eagle easel elbow engine fabric falcon
    feather fern ferry fiddle fig flagon flute forest forge fountain fox furnace galley garden
    garlic garnet gate ginger glacier glove goblet goose gravel guitar hammer hammock harbor harp
    hatchet hawk hedge helmet heron hive honey hoop horn hornet island ivy jacket jar jasmine jewel
    jigsaw jug kayak kennel kettle kite knot ladder ladle lagoon lantern lark lemon lever lichen
    lily linen lizard locket loom magnet mango mantle maple marble market marsh mask meadow melon
    mirror mitten monocle moth mountain mustard napkin needle nettle nugget nutmeg oar oasis oboe
    orchard orchid otter oven oyster paddle pagoda palace panther papaya parcel parrot pebble
    pelican pencil pendant pepper piano picnic pigeon pillow pine pitcher planet plum pocket pony
    poplar poppy pottery puddle pumpkin puppet quarry quill quilt rabbit radish raft raisin raven
    ribbon river robin rocket rope saddle saffron salmon sandal satchel saucer scarf shed shell
    shovel shutter sickle skillet sled slipper sparrow spindle sponge spoon squid statue stool stove
    straw sugar sundial swan table tapestry teapot temple thimble thistle thunder ticket timber
    toffee torch tower trail trellis trumpet tulip tunnel turnip turtle valley vase village vine
    violin wagon wallet walnut walrus whistle willow window woodpecker wren yarn zebra zipper
    """.split()
)

VERBS = tuple(
    """
    admire adopt agree amuse announce answer appear arrange arrive ask assemble attend bake balance
    bargain begin believe belong borrow bounce build calculate carve catch celebrate chase choose
    climb collect compare complain compose confess consider copy count cover crawl create dance
    decide decorate defend deliver describe design dig discover divide dream dress earn embrace
    encourage enjoy escape examine expect explain explore fasten fetch float fold follow forgive
    gather giggle glance glide greet grow guess guide hesitate hum hurry imagine improve inform
    inspect invent invite join juggle jump kneel knit launch learn lend listen march measure mend
    mention mumble navigate nod notice obey observe offer paint pause persuade plant polish ponder
    practise prepare promise pretend provide pull punish push question reach receive recite recover
    refuse remember repair repeat rescue respect roam row sail scatter scrub search shout sing skate
    sketch sneeze solve stir stitch stroll struggle stumble suggest swallow swim teach tremble trust
    unfold unpack vanish visit wander warn whisper wonder wrap write yawn
    """.split()
)

_ONSETS = "b br c ch d dr f fl g gr h j k l m n p pr qu r s sh st t th tr v w z".split()
_VOWELS = "a ae ai e ea i ia o oa oo ou u".split()
_CODAS = "b ck d l ld m n nd nt r rk rn s sk st th x".split()


@functools.lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """All English words of this module, sorted: the lists and words of Python's documentation.

    The latter are lower-case words of 4 to 12 letters that occur at least twice.
    """
    counts = Counter(re.findall(r"(?<![\w.'-])[a-z]{4,12}(?![\w'-])", python_topics()))
    common = {word for word, count in counts.items() if count > 1}
    return tuple(sorted(common | {*ADJECTIVES, *NOUNS, *VERBS}))


def word_stream(draw: random.Random) -> Iterator[str]:
    """Endless distinct words: the vocabulary in a drawn order, then invented ones."""
    known = list(vocabulary())
    draw.shuffle(known)
    yield from known
    yield from distinct(lambda: "".join(_syllable(draw) for _ in range(3)), known)


def distinct(make: Callable[[], str], known: Iterable[str] = ()) -> Iterator[str]:
    """What `make` returns, without `known` items and repetitions."""
    seen = set(known)
    while True:
        item = make()
        if item not in seen:
            seen.add(item)
            yield item


class Growing:
    """The first items of a stream, which are kept for the next call."""

    def __init__(self, stream: Iterator[str]):
        self._stream, self._found = stream, list[str]()

    def __call__(self, number: int) -> list[str]:
        """The first `number` items."""
        self._found += itertools.islice(self._stream, max(number - len(self._found), 0))
        return self._found[:number]


def invented_name(draw: random.Random) -> str:
    """A capitalised, meaningless name of two syllables."""
    return (_syllable(draw) + _syllable(draw)).capitalize()


def _syllable(draw: random.Random) -> str:
    return draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS)
