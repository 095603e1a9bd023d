from tekoa.sharding.layout import Layout as Layout
from tekoa.sharding.layout import constrain as constrain
from tekoa.sharding.mesh import LayoutError as LayoutError
from tekoa.sharding.mesh import make_mesh as make_mesh
