"""Published figures of PatrickStar, ZeRO-Offload and Angel-PTM beside ours: one module per paper."""
