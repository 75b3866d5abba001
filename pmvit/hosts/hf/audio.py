"""The Audio Spectrogram Transformer (AST) of Hugging Face transformers: a DeiT on spectrograms."""

from pmvit.hosts.hf.tower import AUDIO
from pmvit.hosts.hf.vit import HuggingFaceViT
from pmvit.hosts.host import register


@register
class HuggingFaceAudio(HuggingFaceViT):
    """Patches overlap, and stand in rows of a frequency and columns of a time. Spectrograms come as (frames, bins)."""

    key = "hf-audio"
    family = "Hugging Face audio spectrogram transformer (AST)"
    families = AUDIO

    def input_size(self) -> tuple[int, ...]:
        """Frames and mel bins."""
        config = self.tower.host.config
        return int(config.max_length), int(config.num_mel_bins)

    def grid(self) -> tuple[int, ...]:
        projection = self.tower.projection
        sides = zip(reversed(self.input_size()), projection.kernel_size, projection.stride, strict=True)
        bins, frames = ((side - size) // stride + 1 for side, size, stride in sides)
        return bins, frames
