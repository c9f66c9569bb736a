"""Images of folders and .npz files: what is read, what is refused, and batches."""

import json
import zlib

import numpy as np
import pytest
from PIL import Image

from gpuattn.data import images as module
from gpuattn.data import pictures
from gpuattn.data.class_names import ClassNames
from gpuattn.data.images import ImageLoader, read_images, shape_of, squares_of
from gpuattn.errors import DataError


@pytest.fixture
def squares(rng):
    return rng.integers(0, 256, (7, 5, 6, 3), np.uint8)


def saved(path, save=np.savez, **arrays):
    save(path, **arrays)
    return path


def read(path, side=5, channels=3, **options):
    return read_images(path, side, channels, path.parent / "cache", **options)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz(tmp_path, squares, save):
    labels = np.array([4, 11, 4, 9, 9, 11, 4], np.int16)
    path = saved(tmp_path / "a.npz", save, images=squares, labels=labels)
    found = read(path)
    np.testing.assert_array_equal(found.images, squares)
    assert found.names == ("4", "9", "11") and found.labels.dtype == np.int32
    assert found.labels.tolist() == [0, 2, 0, 1, 1, 2, 0] and shape_of(path) == squares.shape
    assert isinstance(found.images, np.memmap) == (save is np.savez)
    np.testing.assert_array_equal(squares_of(path), squares)
    np.testing.assert_array_equal(read(path, names=["11", "x", "9", "4"]).labels,
                                  [3, 0, 3, 2, 2, 0, 3])  # fmt: skip
    words = saved(tmp_path / "b.npz", images=squares[..., 0], labels=np.array(list("babacab")))
    gray = read(words, channels=1)
    assert gray.images.shape == (7, 5, 6, 1) and gray.names == ("a", "b", "c")
    assert gray.labels.tolist() == [1, 0, 1, 0, 2, 0, 1] and gray.digest != found.digest
    turned = saved(tmp_path / "c.npz", images=np.asfortranarray(squares), labels=labels)
    np.testing.assert_array_equal(read(turned).images, squares)


@pytest.mark.parametrize("change, error", [
    ({"images": np.zeros((2, 5, 5, 3), "f4")}, "images is float32 .*accepted: uint8"),
    ({"images": np.zeros((2, 5), "u1")}, r"images is uint8 \(2, 5\)"),
    ({"images": np.zeros((2, 5, 5), "u1")}, r"5 x 5 pixels with 1 \(gray\) channels; accepted"),
    ({"images": np.zeros((2, 5, 4, 3), "u1")}, "5 x 4 pixels .*at least 5 on a side"),
    ({"images": np.zeros((2, 5, 5, 4), "u1")}, "with 4 channels"),
    ({"labels": np.zeros(3, int)}, r"labels is int64 \(3,\); accepted: whole numbers or strings"),
    ({"labels": np.zeros(2)}, "labels is float64"),
    ({"labels": np.array([1, None])}, "labels holds Python objects"),
    ({"images": np.zeros((0, 5, 5, 3), "u1"), "labels": np.zeros(0, int)}, "of 0 images"),
    ({"labels": None}, "no item named 'labels.npy' .*accepted: images and labels"),
])  # fmt: skip
def test_an_npz_that_cannot_be_used(tmp_path, change, error):
    arrays = {"images": np.zeros((2, 5, 5, 3), "u1"), "labels": np.zeros(2, int)} | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(DataError, match=error) as caught:
        read(saved(tmp_path / "a.npz", **arrays))
    assert "is no .npz" not in str(caught.value) or "Python objects" in error


def test_damaged_files(tmp_path, squares, monkeypatch):
    path = saved(tmp_path / "a.npz", np.savez_compressed, images=squares, labels=np.arange(7))
    content = path.read_bytes()
    for cut in (content[:-30], content[:150] + bytes(100) + content[250:], b"text", b""):
        path.write_bytes(cut)
        with pytest.raises(DataError, match="a.npz is no .npz of arrays"):
            read(path)
    with pytest.raises(DataError, match="cannot read .*nothing"):
        read(tmp_path / "nothing")
    assert shape_of(tmp_path / "nothing") is None and shape_of(path) is None
    assert shape_of(saved(tmp_path / "row.npz", images=np.zeros(3, "u1"))) is None
    path.write_bytes(content)
    monkeypatch.setattr(module, "MOST_COMPRESSED", 100)
    with pytest.raises(DataError, match="compressed; accepted: up to .*numpy.savez"):
        read(path)


def test_labels_unseen_in_training_are_named(tmp_path, squares):
    path = saved(tmp_path / "a.npz", images=squares, labels=np.array(list("abcdefg")))
    with pytest.raises(DataError, match="has 'a', 'c', 'e', 'f', 'g' among its labels, unseen"):
        read(path, names=["b", "d"])


# ---- image files --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, rng):
    """Two classes; gray, transparent, CMYK, palette, 16-bit, 1 x 1 and long images among them."""

    def noise(*shape):
        return rng.integers(0, 256, shape, np.uint8)

    for name in ("cat/more", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    cat, dog = (tmp_path / "photos" / name for name in ("cat", "dog"))
    Image.fromarray(noise(9, 12, 3)).save(cat / "a.jpg")
    Image.fromarray(noise(9, 12)).save(cat / "gray.png")
    Image.fromarray(noise(9, 12, 4)).save(cat / "more" / "transparent.png")
    Image.fromarray(noise(9, 12, 4), "CMYK").save(cat / "more" / "cmyk.jpg")
    Image.fromarray(noise(9, 12, 3)).convert("P").save(dog / "palette.gif")
    Image.fromarray(np.full((9, 9), 0x8040, np.uint16)).save(dog / "sixteen.png")
    Image.fromarray(noise(1, 1, 3)).save(dog / "one.png")
    Image.fromarray(noise(1, 3000, 3)).save(dog / "long.PNG")
    (dog / "notes.txt").write_text("no image")
    return tmp_path / "photos"


def test_a_folder_of_classes(folder):
    said = []
    found = read(folder, 6, say=said.append)
    assert found.images.shape == (8, 6, 6, 3) and found.names == ("cat", "dog")
    assert found.labels.tolist() == [0] * 4 + [1] * 4 and "8 images are decoded once" in said[0]
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix[1:3]
                   .lower() in ("jp", "pn", "gi"))  # fmt: skip
    for name, image in zip(names, found.images, strict=True):
        one = np.asarray(pictures.read_picture(folder / name, 6, 3))
        np.testing.assert_array_equal(image, one, err_msg=name)
    one = found.images[names.index("dog/one.png")]
    np.testing.assert_array_equal(one, np.broadcast_to(one[:1, :1], (6, 6, 3)))
    assert (found.images[names.index("dog/sixteen.png")] == 0x80).all()
    gray = found.images[names.index("cat/gray.png")]
    assert (gray[..., :1] == gray).all()
    again = read(folder, 6, say=said.append)
    assert len(said) == 1 and again.digest == found.digest
    assert read(folder, 6, 1, say=said.append).images.shape == (8, 6, 6, 1) and len(said) == 2


def test_image_files_that_cannot_be_used(tmp_path):
    def refused(name):
        with pytest.raises(DataError) as caught:
            pictures.read_picture(tmp_path / name, 4, 3)
        return str(caught.value).removeprefix(str(tmp_path / name))

    (tmp_path / "text.png").write_text("text")
    Image.new("F", (3, 3)).save(tmp_path / "float.tiff")
    Image.new("L", (30_000, 10)).save(tmp_path / "good.png")
    content = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[:60])
    side = (30_000).to_bytes(4, "big")  # width and height of the header, and its checksum
    head = content[12:16] + side + side + content[24:29]
    bomb = content[:12] + head + zlib.crc32(head).to_bytes(4, "big") + content[33:]
    (tmp_path / "bomb.png").write_bytes(bomb)
    assert refused("text.png") == " is no image that Pillow knows"
    assert refused("float.tiff") == " has 32 bits a pixel; accepted: 8 or 16"
    assert refused("cut.png").startswith(" cannot be read as an image: ")
    assert refused("none.png") == " cannot be read as an image: No such file or directory"
    assert refused("bomb.png").startswith(" has too many pixels; accepted: up to 67,108,864 in all")


def test_transparent_images_lie_on_white_and_whole_ones_are_squeezed(tmp_path):
    image = np.zeros((4, 8, 4), np.uint8)
    image[:, :2, 3] = 255  # black at the left, else transparent
    Image.fromarray(image).save(tmp_path / "a.png")
    middle = pictures.read_picture(tmp_path / "a.png", 4, 1)
    assert middle.shape == (4, 4, 1) and (middle == 255).all()
    whole = pictures.read_picture(tmp_path / "a.png", 4, 1, whole=True)
    assert whole[:, 0].max() < 50 and whole[:, -1].min() == 255


def test_all_images_that_cannot_be_used_are_named(folder, monkeypatch):
    content = (folder / "cat/a.jpg").read_bytes()
    (folder / "cat" / "cut.jpg").write_bytes(content[: len(content) // 2])
    (folder / "dog" / "text.png").write_text("hello")
    monkeypatch.setattr(pictures, "MOST_PIXELS", 2000)
    with pytest.raises(DataError) as caught:
        read(folder)
    text = str(caught.value)
    assert text.startswith("3 of 10 images cannot be used: ")
    assert "cut.jpg cannot be read" in text and "text.png is no image" in text
    assert "long.PNG has 3,000 x 1 pixels; accepted: up to 2,000" in text
    assert not list((folder.parent / "cache").iterdir())  # nothing half written


def test_folders_without_classes_or_images(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no folders in it"):
        read(tmp_path / "empty")
    (folder / "bird").mkdir()
    with pytest.raises(DataError, match="photos has no images in bird"):
        read(folder)


# ---- batches and names --------------------------------------------------------------------------


def loader(**options):
    images = np.arange(20 * 9, dtype=np.uint8).reshape(20, 3, 3, 1)
    options = {"batch": 4, "seed": 3} | options
    return ImageLoader(images, np.arange(20, dtype=np.int32), np.arange(1, 19), **options)


def test_an_epoch_has_each_image_at_most_once_and_resumes():
    batches = list(loader().epoch(1))
    labels = np.concatenate([batch.labels for batch in batches])
    assert len(batches) == loader().batches(1) == 4 and len(set(labels)) == 16
    assert min(labels) >= 1 and max(labels) <= 18
    first = loader().images
    for batch in batches:
        assert batch.target_tokens == 4 and batch.limits == (4, 3, 3, 1)
        np.testing.assert_array_equal(batch.images, first[batch.labels])
    for again, batch in zip(loader().epoch(1, 2), batches[2:], strict=True):
        np.testing.assert_array_equal(again.pixels, batch.pixels)
    assert [b.labels.tolist() for b in loader().epoch(0)] != [b.labels.tolist() for b in batches]
    ranks = [list(loader(rank=rank, world=2).epoch(1)) for rank in (0, 1)]
    assert len(set(np.concatenate([b.labels for part in ranks for b in part]))) == 16


def test_images_held_out_come_once_and_small_data_fill_a_batch():
    assert [batch.labels.tolist() for batch in loader(batch=8).all()] == [
        list(range(1, 9)), list(range(9, 17)), [17, 18],
    ]  # fmt: skip
    (batch,) = loader(batch=25).epoch(0)
    assert np.bincount(batch.labels)[1:19].min() == 1 and batch.shape == (25, 3, 3, 1)
    assert batch.mix is None and batch.shares is None


def test_shares_of_mixtures_depend_on_the_batch():
    mixed = list(loader(mixup=0.5).epoch(0))
    shares = np.concatenate([batch.shares for batch in mixed])
    assert len(set(shares)) == 16 and shares.min() >= 0 and shares.max() <= 1
    (again,) = loader(mixup=0.5).epoch(0, 3)
    np.testing.assert_array_equal(again.shares, mixed[3].shares)


def test_names_of_classes():
    names = ClassNames(["a b", "\u00e9"])
    again = ClassNames.from_bytes(names.to_bytes())
    assert again.names == names.names and len(again) == 2 and again.piece(1) == "\u00e9"
    for wrong in (b"[1]", b"{}", b"[", json.dumps("ab").encode()):
        with pytest.raises(DataError, match="no names of classes"):
            ClassNames.from_bytes(wrong)
