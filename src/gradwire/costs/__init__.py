"""What collectives and codecs cost: alpha-beta models, codec times, fits that keep their residuals. Pure: no torch."""

__all__: list[str] = []
