//! Probing arbitrary and hand-made bytes.
