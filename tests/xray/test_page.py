"""The page of an X-ray: one HTML file that needs nothing else."""

import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import gainstage as gs
from gainstage.diagnostics import xray

pytest.importorskip("jinja2")
HALF = jnp.float16
X = jnp.linspace(-1, 1, 12).reshape(3, 4)
KERNEL = jnp.eye(4) + 0.25


class Tags(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open += [] if tag == "meta" else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def of(self, kind):
        """The attributes of the tags of a class."""
        each = (attributes for _, attributes in self.found)
        return [a for a in each if kind in a.get("class", "").split()]


def network(between=lambda h: h):
    """A loss of some layers, with something between them."""

    def loss(params, x):
        h = x.astype(HALF)
        for kernel in params.values():
            h = jnp.tanh(between(h) @ kernel.astype(HALF))
        return (h.astype(jnp.float32) ** 2).mean()

    return loss


def overflow(h):
    return (jnp.abs(h) + 2) * HALF(2.0**15) * HALF(2.0**-15)


def drawn(path, loss, params=None, scale=2.0**10, **options):
    """An X-ray, the text of its page, and the page as a browser reads it."""
    params = {name: KERNEL for name in ("up", "down")} if params is None else params
    x = xray(loss, params, X, scale=scale, **{"compiled": False} | options)
    x.to_html(path / "step.html")
    text = (path / "step.html").read_text(encoding="utf-8")
    return x, text, Tags(text)


def test_the_page_of_a_bad_step_says_all(tmp_path):
    """Summary, cause, what was tried, windows, gradients and version, one after the other."""
    backward = network(lambda h: h * HALF(2.0**-10) * HALF(2.0**10))
    x, text, tags = drawn(tmp_path, backward, scale=2.0**15)
    words = "".join(tags.words)
    places = [
        words.index(part)
        for part in (x.summary, "Causes", "mul, backward", x.causes[0].message, x.causes[0].place,
                     "Tried", x.remedies[0].change, "Loss scales that fit",
                     f"Above, {x.window().highest} overflows", "Errors of the gradients",
                     "Not finite: ", f"gainstage {gs.__version__}")
    ]  # fmt: skip
    assert places == sorted(places)
    assert tags.of("summary")[0]["class"] == "summary bad"
    assert "scale of this step" in words
    assert len(text) < 30_000


def test_the_page_of_a_healthy_step(tmp_path):
    """No cause, nothing tried, a window for each layer, and a bar for each gradient."""
    x, _, tags = drawn(tmp_path, network())
    words = "".join(tags.words)
    assert "CausesNone." in words
    assert "Tried" not in words
    assert tags.of("summary")[0]["class"] == "summary good"
    assert len(tags.of("row")) == len(x.windows()) + 1 + len(x.gradient_errors) + 1
    assert len(tags.of("now")) == len(x.windows()) + 1


@pytest.mark.parametrize("name", ["<b>&", '"><img src=x onerror=alert(1)>', "$title", "\ud800"])
def test_names_are_only_names(name, tmp_path):
    """Whatever a parameter is called, it makes no tag and no attribute in the page."""
    _, text, tags = drawn(tmp_path, network(overflow), {name: KERNEL}, prescribe=False)
    assert {tag for tag, _ in tags.found}.isdisjoint({"script", "img", "link", "iframe"})
    bold = [tag for tag, _ in tags.found if tag == "b"]
    assert len(bold) == 1  # of the layer that overflows first
    if name.isprintable():
        assert any(name in data for data in tags.words)
    attributes = {key for _, attributes in tags.found for key in attributes}
    assert not {key for key in attributes if key.startswith("on")} | attributes & {"src", "href"}
    assert not re.search(r"url\(|http|@import", text)


def test_coordinates_are_numbers(tmp_path):
    """Where a window has no least scale, or nothing is finite, no coordinate is infinite or NaN."""
    for loss in (network(overflow), network(), network(lambda h: h * HALF(0)), network(jnp.log)):
        _, _, tags = drawn(tmp_path, loss)
        styles = [attributes["style"] for _, attributes in tags.found if "style" in attributes]
        assert not re.search("nan|inf|-", " ".join(styles))


def test_a_step_without_layers(tmp_path):
    """A step in float32 has no windows, and its page has no drawing of them."""
    x, _, tags = drawn(tmp_path, lambda params, x: (params["w"] * x).sum(), {"w": jnp.ones(4)})
    assert x.windows() == {}
    assert "Loss scales that fit" not in "".join(tags.words)


def test_layers_that_no_scale_fits(tmp_path):
    """Where windows do not overlap the page says which layers, and shades nothing."""

    def both(h):  # backward first far down and up again, then far up and down
        far = h * HALF(2.0**-22) * HALF(2.0**15) * HALF(2.0**7)
        return far * HALF(2.0**14) * HALF(2.0**-14)

    x, _, tags = drawn(tmp_path, network(both))
    assert x.window().is_empty
    assert f"{x.window().lowest} needs at least" in "".join(tags.words)
    assert [a["class"] for a in tags.of("shade")] == ["shade key"]


def test_many_gradients_are_cut(tmp_path):
    """The worst 20 gradients and 40 layers are drawn, and the others counted."""
    params = {f"layer{i}": KERNEL for i in range(45)}

    def loss(params, x):
        h = x.astype(HALF)
        for kernel in params.values():
            h = h + HALF(0.1) * jnp.tanh(h @ kernel.astype(HALF))
        return h.astype(jnp.float32).mean()

    _, text, tags = drawn(tmp_path, loss, params)
    assert "and 25 more" in "".join(tags.words)
    assert "and 5 more layers" in "".join(tags.words)
    assert len(tags.of("row")) == 40 + 1 + 20 + 1
    assert len(text) < 60_000


def test_it_says_what_it_does_not_see(tmp_path):
    """Operations that are not looked into are on the page."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    spec = PartitionSpec()
    inside = jax.shard_map(lambda h: h, mesh=mesh, in_specs=spec, out_specs=spec)
    _, _, tags = drawn(tmp_path, network(inside), prescribe=False)
    assert "does not look inside of shard_map" in "".join(tags.words)


def test_the_page_says_that_parameters_have_diverged(tmp_path):
    """The caution of the X-ray stands below the changes that were tried."""
    x = xray(network(overflow), {"kernel": KERNEL * 1e3}, X, compiled=False)
    x.to_html(tmp_path / "x.html")
    assert "The parameters have diverged: kernel has" in (tmp_path / "x.html").read_text()
