"""DFlash (2602.06036): a head that fills a block from the states of the target."""
