"""Other engines that pop-bench can time, a file each."""
