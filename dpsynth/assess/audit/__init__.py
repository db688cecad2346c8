"""Audits: attacks on models trained under a plan with canaries planted, and their verdict."""
