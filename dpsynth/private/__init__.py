"""Spends budget; each mechanism returns released values and a receipt."""
