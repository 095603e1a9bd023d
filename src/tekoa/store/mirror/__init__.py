"""Run directories in object stores: a working copy on disk, published as a whole.

From the outside to the inside:

    mirror        a run directory at a URL, opened for writing or for reading
    publisher     the writer: uploads the working copy, puts the head, deletes what it replaced
    view          a reader: a local copy that follows the head
    snapshot      what a working copy contains at one moment, and what of it is new
    fetch         downloads files and verifies them
    head          the one object that says which objects are the files of the run
    remote_lease  refuses a second writer; what stops a replaced one is the fence in the head
    urls          which paths are URLs
    objects       the objects below a URL
    versions      the conditional put, a request of each store's own
    work_dirs     where local copies are
    registry      tells the publisher that a step was committed
"""
